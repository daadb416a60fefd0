"""The behaviour of a forked process with its parent's pool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from mlflow_llm.serving.sandbox import Pool


def check_fork(pool: Pool, work: Callable[[], Any]) -> None:
    """Check that a forked process uses its own processes and leaves its parent's working."""
    wanted = work()
    (process,) = pool.processes
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"no"
        with contextlib.suppress(BaseException):
            said = b"ok" if not pool.processes and work() == wanted else b"wrong"
            pool.close()
        os.write(writer, said)
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 16) == b"ok"
    os.close(reader)
    os.waitpid(child, 0)
    assert work() == wanted
    assert pool.processes == {process}
