"""The side of `compare.py`: a contender is a process that answers lines of JSON (`drive`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any


class Failed(RuntimeError):
    """A contender could not do what it was asked, and this is why."""


class Process:
    """``log`` takes what the contender prints; its end is told when it dies."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self._log, self._rest = log, b""
        self.servers = False
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )

    def ask(self, message: dict[str, Any], limit: float) -> dict[str, Any]:
        """The answer. Raises ``Failed`` for an error, the process's end, or none within ``limit`` seconds."""
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

    def processor_seconds(self) -> float:
        """Of the process and all below it so far; without its own where ``servers`` do the work."""
        import psutil

        top = psutil.Process(self._process.pid)
        total = 0.0
        for process in [*([] if self.servers else [top]), *top.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def close(self) -> None:
        """End it: by the end of its input first, so that it can end its servers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
