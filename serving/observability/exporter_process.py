"""Start the trace exporter of a server that traces, and end it after the last span."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ..system import child

END_SECONDS = 10.0


@contextlib.contextmanager
def exporting(directory: Path, *, sample: float, experiment: str, log_file: str | None = None) -> Iterator[None]:
    """Run the exporter for the duration of the ``with`` block; do nothing if ``sample`` is 0.

    The exporter finds its stores in this process's environment. Its standard input closes when the block or this
    process ends, however that happens.
    """
    if sample == 0:
        yield
        return
    arguments = (str(directory), experiment, *([log_file] if log_file else []))
    command = child.python_command("serving.observability.trace_exporter", *arguments)
    # MLflow imports LiteLLM if it is installed, which would fetch a price list from the network
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
