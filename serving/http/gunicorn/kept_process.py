"""Processes that the arbiter keeps running beside its workers: the controller process and the gRPC process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...interface.errors import EngineDied, PackagingError
from ...system import child, logs

Progress = Callable[[dict[str, Any]], None]
RESTART_SECONDS = 2.0


class KeptProcess:
    """A module that runs as a child process, and is started again if it ends unasked.

    Leaving the context closes the process's standard input, as the death of the server does; the process then ends.
    ``what`` is its name in the log; ``last`` is the progress stage with which it reports that it is ready. It first
    reads ``hello`` from its input, and last ``FAREWELL`` unless the server dies. It has ``seconds`` to end.
    """

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
        """Report the process's steps until it is ready. Raises ``PackagingError`` with its message, and ``EngineDied``
        if it ends first."""
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
        """Start the process again if it has ended, at most every ``RESTART_SECONDS``. Return the ended process's id."""
        if self._is_ending or self._process.poll() is None:
            return None
        if time.monotonic() - self._started_at < RESTART_SECONDS:
            return None
        # the exit status is not logged: gunicorn has collected it together with those of the workers
        logs.event(f"{self._what} ended and is started again", level=40)
        self._close_pipes()
        ended = self._process.pid
        self._process = self._start()
        return ended

    def signal(self, number: int) -> None:
        """Send the process a signal that ends it; on SIGTERM it finishes what is running."""
        self._is_ending = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def forget(self) -> None:
        """Close a worker's copies of the pipes: they must not keep the process alive when the server is gone."""
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> KeptProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, or this is a worker that called ``forget``
            os.write(self._process.stdin.fileno(), child.FAREWELL)
        self._close_pipes()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._seconds)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
