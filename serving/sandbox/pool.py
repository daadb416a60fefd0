"""Pools of confined processes, started on demand and shared by all models of this process.

The semaphore of a pool is a pipe with one byte for each free place: a thread or, with ``use_wait``, a greenlet waits
for it as for any other descriptor, without a lock. Each model has its own places (``Share``), so that slow templates of
one model do not keep other models waiting.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from .limits import Ended, Limits, NoProcess, Refused
from .process import Process, Wait

NUM_PLACES = 4  # for work that belongs to no served model; also the number of idle processes that are kept
PLACES_PER_MODEL = 2
WAIT_SECONDS = 30.0  # for a free place
_poll = select.poll  # the system's; if gevent was loaded before, ``use_wait`` replaces it


def thread_wait(fd: int, writing: bool, seconds: float) -> bool:
    """Block this thread until ``fd`` can be read (or written); return False after ``seconds``."""
    poll = _poll()
    poll.register(fd, select.POLLOUT if writing else select.POLLIN)
    return bool(poll.poll(seconds * 1000))


current_wait: Wait = thread_wait


def use_wait(wait: Wait) -> None:
    """Set the function with which this process waits for descriptors from now on."""
    global current_wait
    current_wait = wait


def wait(fd: int, writing: bool, seconds: float) -> bool:
    """Wait as this process does: return whether ``fd`` can be read (or written) within the time."""
    return current_wait(fd, writing, seconds)


class _Semaphore:
    """A counting semaphore for threads and greenlets. In a forked process, all places are free at first."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._pipes: dict[int, tuple[int, int]] = {}  # by process id

    @contextlib.contextmanager
    def hold(self, until: float) -> Iterator[None]:
        """Hold one place. Raises ``NoProcess`` if none is free before ``until`` (monotonic seconds)."""
        reader, writer = self._open()
        while True:
            try:
                os.read(reader, 1)
                break
            except BlockingIOError:
                left = until - time.monotonic()
                if left <= 0:
                    raise NoProcess("all processes are busy") from None
                current_wait(reader, False, left)
        try:
            yield
        finally:
            if self._pipes.get(os.getpid()) == (reader, writer):  # not in a forked copy of a frame that holds a place
                os.write(writer, b".")

    def _open(self) -> tuple[int, int]:
        mine = os.getpid()
        found = self._pipes.get(mine)
        if found is not None:
            return found
        made = os.pipe()
        os.set_blocking(made[0], False)
        os.write(made[1], b"." * self.places)
        found = self._pipes.setdefault(mine, made)  # atomic, also between threads
        _close(made if found is not made else ())
        for other in self._pipes.keys() - {mine}:
            _close(self._pipes.pop(other, ()))
        return found

    def close(self) -> None:
        while self._pipes:
            _close(self._pipes.popitem()[1])


def _close(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


class Share:
    """The places of one model."""

    def __init__(self) -> None:
        self.places = _Semaphore(PLACES_PER_MODEL)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.places.close()


class Turns:
    """The turns of the callers of a pool: each has one at a time, so that none takes all places. Thread-safe."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[_Semaphore, int]] = {}  # by caller, with how many hold it or wait for it
        self._guard = _Semaphore(1)  # no lock of ``threading``: gevent's, where it has patched that, hang threads
        os.register_at_fork(after_in_child=self._forget)

    @contextlib.contextmanager
    def hold(self, caller: str, until: float) -> Iterator[None]:
        """Hold the caller's turn; "" is no caller, and waits for nobody. Raises ``NoProcess`` as a place does."""
        if not caller:
            yield
            return
        with self._guard.hold(until):
            place, users = self.places.get(caller) or (_Semaphore(1), 0)
            self.places[caller] = place, users + 1
        try:
            with place.hold(until):
                yield
        finally:
            with self._guard.hold(time.monotonic() + WAIT_SECONDS):
                found, users = self.places.get(caller, (place, 0))
                if found is place and users > 1:
                    self.places[caller] = place, users - 1
                elif found is place:
                    self.places.pop(caller, None)
                    place.close()

    def _forget(self) -> None:
        self.places = {}


class Pool:
    """A pool of confined processes. Thread-safe, and safe across a fork."""

    def __init__(self, places: int = NUM_PLACES) -> None:
        self.places = _Semaphore(places)
        self._idle: deque[Process] = deque()
        self.processes: set[Process] = set()
        self._turns = Turns()
        os.register_at_fork(after_in_child=self._forget)

    def run(
        self,
        work: str,
        limits: Limits,
        *,
        data: bytes = b"",
        source: str | None = None,
        share: Share | None = None,
        caller: str = "",
        **asked: Any,
    ) -> Any:
        """Do ``work`` (a name in ``child.WORK``) and return its value; for raw bytes, what is said of them and they.

        A ``caller`` has one place at a time; "" is not bounded so.

        Work whose process was killed by another program (the kernel, out of memory) is tried once more. Raises
        ``Exceeded``, ``Refused``, ``Ended`` and ``NoProcess``.
        """
        until = time.monotonic() + WAIT_SECONDS
        places = self.places if share is None else share.places
        with self._turns.hold(caller, until), places.hold(until):
            try:
                return self._run({"work": work, **asked}, data, source, limits)
            except Ended:
                return self._run({"work": work, **asked}, data, source, limits)

    def close(self) -> None:
        """End the idle processes. The pool can still be used: it starts new ones."""
        while self._idle:
            self._drop(self._idle.pop())

    def _run(self, work: dict[str, Any], data: bytes, source: str | None, limits: Limits) -> Any:
        process = self._take()
        whole = False
        try:
            value = process.run(work, data, source, limits, current_wait)
            whole = True
            return value
        except Refused:
            whole = True
            raise
        finally:
            if whole and not process.is_used_up and len(self._idle) < NUM_PLACES:
                self._idle.append(process)
            else:
                self._drop(process)

    def _take(self) -> Process:
        try:
            return self._idle.pop()
        except IndexError:
            process = Process()
            self.processes.add(process)
            return process

    def _drop(self, process: Process) -> None:
        self.processes.discard(process)
        process.close()

    def _forget(self) -> None:
        """Drop the processes in a forked child: they are the parent's, and our copies of their pipes must not keep them
        alive."""
        self._idle.clear()
        for process in self.processes:
            process.close()
        self.processes.clear()


POOL = Pool()
# Its processes render nothing: a decoder that was taken over sees no request but images.
IMAGES = Pool(PLACES_PER_MODEL)
