"""Starts the trace exporter beside a server that traces, and ends it after the last span."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from .. import child

END_SECONDS = 10.0


@contextlib.contextmanager
def exporting(directory: Path, *, sample: float, experiment: str) -> Iterator[None]:
    """The exporter for as long as the block lasts; nothing where ``sample`` is 0. It takes its stores from this
    process' environment; its standard input closes with the block, or with this process, however that ends."""
    if sample == 0:
        yield
        return
    command = child.python_command("serving.observability.trace_exporter", str(directory), experiment)
    # MLflow imports LiteLLM where it is installed, which would ask a server of its own for prices
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", **child.environment()}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=env)
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        if process.poll() is None:
            process.kill()
            process.wait()
