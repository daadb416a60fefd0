"""Processes that the arbiter keeps beside its workers: the controller process, and the one that serves gRPC."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import child, logs
from ...errors import EngineDied, PackagingError

Progress = Callable[[dict[str, Any]], None]
RESTART_SECONDS = 2.0


class KeptProcess:
    """A module run as a process. Leaving (or dying) closes its standard input, at which it ends; killed, it is started
    again. ``what`` it is in the log; ``last`` is the step with which it says that it is ready. It reads ``hello``
    first, and ``FAREWELL`` last unless its server dies; at its end it is given ``seconds``."""

    def __init__(
        self, module: str, directory: Path, *, what: str, last: str, hello: bytes = b"", seconds: float = 10.0
    ) -> None:
        self._module, self._directory, self._what, self._last = module, directory, what, last
        self._hello, self._seconds = hello, seconds
        self._is_ending = False
        self._started_at = 0.0
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._started_at = time.monotonic()
        command, env = child.python_command(self._module, str(self._directory)), child.environment()
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=env
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(self._hello)
            process.stdin.flush()
        return process

    def await_ready(self, progress: Progress) -> None:
        """Raises ``PackagingError`` with what it says, ``EngineDied``."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            step = json.loads(line)
            if step["stage"] == "failed":
                raise PackagingError(step["message"])
            progress(step)
            if step["stage"] == self._last:
                return
        raise EngineDied(f"{self._what} ended before it was ready")

    def ensure_running(self) -> int | None:
        """Start it again where it has ended, at most every ``RESTART_SECONDS``; the process id of one that ended."""
        if self._is_ending or self._process.poll() is None:
            return None
        if time.monotonic() - self._started_at < RESTART_SECONDS:
            return None
        # without its exit status, which gunicorn has collected with the workers'
        logs.event(f"{self._what} ended and is started again", level=40)
        self._close_pipes()
        ended = self._process.pid
        self._process = self._start()
        return ended

    def signal(self, number: int) -> None:
        """Have it end: by SIGTERM what runs finishes."""
        self._is_ending = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def forget(self) -> None:
        """In a worker: our copies of the pipes must not hold it when the server is gone."""
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> KeptProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended; we are a worker, and have forgotten it
            os.write(self._process.stdin.fileno(), child.FAREWELL)
        self._close_pipes()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._seconds)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
