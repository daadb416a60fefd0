"""The side of `compare.py`: a contender is a process that answers lines of JSON (`drive`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARK = "COMPARISON_CONTENDER"  # in the environment of a contender's processes


class Failed(RuntimeError):
    """An error of a contender that could not do its task, with the reason."""


class Process:
    """A contender's process. ``log`` takes its output, whose end is shown when it dies."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self._log, self._rest = log, b""
        self._mark = uuid.uuid4().hex
        self.servers = False
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                start_new_session=True,
                env={**os.environ, **(environment or {}), MARK: self._mark},
            )

    def ask(self, message: dict[str, Any], limit: float) -> dict[str, Any]:
        """Return the answer. Raises ``Failed`` for an error, the process's end, or none within ``limit`` seconds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
            line = self._line(time.monotonic() + limit)
        except BrokenPipeError:
            line = b""
        if not line:
            raise Failed(f"its process ended: {self._last_words()}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise Failed(f"it said what is no JSON: {line[:100]!r}") from None
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def _line(self, until: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise Failed("no answer in time")
            data = os.read(descriptor, 1 << 20)
            if not data:
                return b""
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else f"status {self._process.wait(10)}"

    def cpu_seconds(self) -> float:
        """Return the CPU time so far of the process and all its descendants; without its own if ``servers`` do the
        work."""
        import psutil

        total = 0.0
        for process in self._all():
            if self.servers and process.pid == self._process.pid:
                continue
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _all(self) -> Iterator[Any]:
        import psutil

        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    yield process

    def close(self) -> None:
        """Stop it by closing its input, so that it can stop its servers; then kill whatever is left."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        for process in self._all():
            process.kill()
        self._process.wait()
        self._process.stdout.close()
