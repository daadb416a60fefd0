"""How another thread, or a signal handler, ends the wait of a loop that waits for descriptors."""

from __future__ import annotations

import contextlib
import os


class WakePipe:
    """Wakes a poller from any thread or signal handler: the self-pipe trick. ``fd`` is to be watched."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # a full pipe wakes as well
            os.write(self._write_fd, b"x")

    def drain(self) -> None:
        """Take back what woke the poller."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """Idempotent; also in a forked child, whose copies these are."""
        for fd in (self.fd, self._write_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self.fd = self._write_fd = -1
