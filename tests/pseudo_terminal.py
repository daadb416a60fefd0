"""A command of ours in a pseudo-terminal, as a person has it before them."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable


class Terminal:
    """A command in a pseudo-terminal of its own session, whose keys are sent and whose screen is read."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        self.pid, self._screen = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-m", "mlflow_llm.serving.cli", *words], environment)
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def read_until(self, text: str, seconds: float = 60) -> str:
        """Return the screen's output up to and with ``text``; what came after it is returned by the next call."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, self.shown
            self.poll()
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def poll(self) -> None:
        """Read what comes within a moment."""
        if select.select([self._screen], [], [], 0.1)[0]:
            self.shown += os.read(self._screen, 4096).decode(errors="replace")

    def wait(self, seconds: float = 60) -> int:
        """Return the exit status, having read what is still written."""
        end = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < end, self.shown
            with contextlib.suppress(OSError):  # the other end is closed when the command ends
                self.poll()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._screen)


OpenTerminal = Callable[..., Terminal]
