"""A pipe with which another thread or a signal handler wakes a loop that waits for file descriptors."""

from __future__ import annotations

import contextlib
import os


class WakePipe:
    """A means to wake a poller from any thread or signal handler (the self-pipe trick). The poller must watch
    ``fd``."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # a full pipe also wakes the poller
            os.write(self._write_fd, b"x")

    def drain(self) -> None:
        """Read the bytes that woke the poller."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """Close both ends. Idempotent; also valid in a forked child, which has its own copies of the descriptors."""
        for fd in (self.fd, self._write_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self.fd = self._write_fd = -1
