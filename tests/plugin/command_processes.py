"""Commands that run while a test looks at them, in process groups of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from processes import alive_after


def llm_command(place: Path, name: str, *words: str) -> contextlib.AbstractContextManager[Path]:
    return running(place, name, sys.executable, "-m", "mlflow_llm.serving.cli", *words)


@contextlib.contextmanager
def running(place: Path, name: str, *words: str) -> Iterator[Path]:
    """Run a command with its log, and end it and all its processes with SIGTERM."""
    log = place / f"{name}.log"
    with log.open("wb") as sink:
        started = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
    try:
        yield log
    finally:
        family = psutil.Process(started.pid).children(recursive=True) if started.poll() is None else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGTERM)
        started.wait(240)
        assert not alive_after(family, 240)


def await_line(log: Path, text: str, seconds: float = 240) -> None:
    until = time.monotonic() + seconds
    while text not in log.read_text():
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.1)
