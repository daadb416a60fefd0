"""A logging handler that never blocks: a pipe that nobody reads, or a stopped terminal, must not stop a server."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal

# bound here, before gevent replaces them in a worker: a greenlet that blocks in a write would stop the worker
from _thread import start_new_thread
from queue import SimpleQueue
from select import poll
from threading import Lock
from typing import Any, TypeAlias

MAX_LINES = 10_000  # lines that wait; more of them than a burst has, and a few megabytes
FLUSH_SECONDS = 1.0

Lines: TypeAlias = "SimpleQueue[str | logging.LogRecord | Any]"
"""What a thread writes, in order: lines, records still to be formatted, and locks to release when it comes to them."""


class QueuedHandler(logging.Handler):
    """A handler that writes lines to ``fd`` in order, on a thread of its own, which starts with the first line.

    At most ``limit`` lines wait. Further ones are lost, and a line in their place says how many. ``flush``, which
    ``logging.shutdown`` calls, waits until all is written, but at most ``FLUSH_SECONDS``.
    """

    def __init__(self, fd: int, limit: int = MAX_LINES) -> None:
        super().__init__()
        self.fd, self._limit = fd, limit
        self._pid = 0  # of the process that has the thread: a fork leaves it, and its lines, to the parent
        self._lines: Lines = SimpleQueue()
        self._lost: dict[str, int] | None = None  # the fields of the line about those that are being lost

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            if self._pid != os.getpid():
                self._start()
            self._put(line)
        except Exception:
            self.handleError(record)

    def _start(self) -> None:
        self._lines, self._lost = SimpleQueue(), None
        start_new_thread(self._write, (self._lines,))
        self._pid = os.getpid()

    def _put(self, line: str) -> None:
        """Queue an item, with the handler's lock held, as ``emit`` is."""
        if self._lines.qsize() < self._limit:
            self._lost = None
            self._lines.put(line)
        elif self._lost is None:
            self._lost = {"lines": 1}
            level = {"levelno": logging.WARNING, "levelname": "WARNING"}
            self._lines.put(logging.makeLogRecord({"msg": "log lines lost", "fields": self._lost, **level}))
        else:
            self._lost["lines"] += 1

    def _write(self, lines: Lines) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
        while True:
            item = lines.get()
            if isinstance(item, str):
                _write_line(self._place(), item)
            elif isinstance(item, logging.LogRecord):
                _write_line(self._place(), self.format(item))
            else:
                item.release()

    def _place(self) -> int:
        """Return the descriptor that the next line goes to."""
        return self.fd

    def flush(self) -> None:
        if self._pid == os.getpid():
            written = Lock()
            written.acquire()
            self._lines.put(written)
            written.acquire(timeout=FLUSH_SECONDS)


class QueuedFile(QueuedHandler):
    """A ``QueuedHandler`` that appends to a file, and opens it again once it has been renamed or removed (logrotate).

    Several processes may append to it: each line is one write. Raises ``OSError`` if it cannot be opened.
    """

    def __init__(self, path: str, limit: int = MAX_LINES) -> None:
        self._path = os.path.abspath(path)
        super().__init__(self._open(), limit)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def _place(self) -> int:
        try:
            is_there = os.path.samestat(os.stat(self._path), os.fstat(self.fd))
        except FileNotFoundError:
            is_there = False
        except OSError:  # who can no longer look goes on where it is
            is_there = True
        if not is_there:
            with contextlib.suppress(OSError):
                opened = self._open()
                os.close(self.fd)
                self.fd = opened
        return self.fd


def _write_line(fd: int, line: str) -> None:
    """Write a line, however long that takes; it is dropped if nobody can ever read it."""
    left = memoryview(f"{line}\n".encode(errors="backslashreplace"))
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # whoever started us has made it non-blocking
            writable = poll()
            writable.register(fd, select.POLLOUT)
            writable.poll()
        except OSError:  # its reader is gone, or its disk is full
            return
