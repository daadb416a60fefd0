"""The client for gevent workers: the loop is a greenlet and the queues are gevent's.

This is the only file here that imports gevent. Use ``attach`` if a supervisor runs the engine; ``connect`` also starts
and restarts it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

import gevent
import gevent.monkey
import gevent.queue
from gevent.hub import Waiter

from ...interface.bundle import Bundle
from ...interface.settings import EngineSettings
from ..discovery.attacher import Attacher
from ..discovery.launcher import Launcher, Progress
from .client import RemoteEngine

READ = 1  # the event loop's flag for a readable descriptor
_ThreadQueue: Any = gevent.monkey.get_original("queue", "SimpleQueue")


class LocalQueue(gevent.queue.SimpleQueue):
    """A queue between greenlets of one hub: only that hub's thread puts items."""

    is_local = True


class GeventPoller:
    """The poller of a loop on a greenlet: other greenlets run while it waits.

    It keeps libev's watchers between waits, whereas zmq.green makes and drops several for each wait. What ``take``
    handles costs only the callback of one watcher.
    """

    def __init__(self) -> None:
        self._hub = gevent.get_hub()
        self._readers: list[tuple[int, Any]] = []
        self._seconds = 0.0
        self._timer: Any = None

    def watch(self, fds: Collection[int]) -> None:
        for _, reader in self._readers:
            reader.close()
        self._readers = [(fd, self._hub.loop.io(fd, READ)) for fd in fds]
        if not fds and self._timer is not None:
            self._timer.close()
            self._timer = None

    def poll(self, seconds: float, take: Callable[[int], bool]) -> Collection[int]:
        waiter = Waiter(self._hub)

        def look(fd: int) -> None:
            try:
                taken = take(fd)
            except BaseException:
                waiter.throw(*sys.exc_info())
                return
            if not taken:
                waiter.switch(fd)

        timer = self._timer_of(seconds)
        timer.again(waiter.switch, None)
        for fd, reader in self._readers:
            reader.start(look, fd)
        try:
            fd = waiter.get()
        finally:
            timer.stop()
            for _, reader in self._readers:
                reader.stop()
        return () if fd is None else (fd,)

    def _timer_of(self, seconds: float) -> Any:
        if self._timer is None or self._seconds != seconds:
            if self._timer is not None:
                self._timer.close()
            self._seconds, self._timer = seconds, self._hub.loop.timer(seconds, seconds)
        return self._timer


class GeventEngine(RemoteEngine):
    """``RemoteEngine`` on greenlets. Create it in the worker that uses it, after the fork."""

    def _open(self) -> None:
        self._hub = gevent.get_hub()
        super()._open()

    def _queue(self) -> Any:
        """Return a queue for the calling greenlet if it is on our hub, else for a thread of the worker, which may
        block."""
        return LocalQueue() if gevent.get_hub() is self._hub else _ThreadQueue()

    def _spawn(self, run: Callable[[], None]) -> Any:
        return gevent.spawn(run)

    def _poller(self) -> GeventPoller:
        return GeventPoller()

    @staticmethod
    def _rest() -> None:
        gevent.sleep(0)


def attach(
    address: str,
    *,
    key_file: str | None = None,
    timeout: float = 60.0,
    stall_timeout: float = 60.0,
    first_timeout: float | None = None,
    content_hash: str = "",
    journal: str = "",
    counts: str = "",
    store: str = "",
) -> GeventEngine:
    """Do the same as ``client.attach``, for a gevent worker.

    For ``journal``, ``counts`` and ``store`` see ``protocol.Hello``. ``first_timeout`` replaces ``timeout`` until
    the first engine is found.
    """

    def make() -> Attacher:
        return Attacher(address, key_file=key_file, timeout=timeout, sleep=gevent.sleep)

    return GeventEngine(
        make,
        stall_timeout=stall_timeout,
        keep=True,
        timeout=timeout if first_timeout is None else first_timeout,
        away_timeout=timeout,
        content_hash=content_hash,
        journal=journal,
        counts=counts,
        store=store,
    )


def connect(
    bundle: Bundle,
    settings: EngineSettings | None = None,
    *,
    state_dir: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> GeventEngine:
    """Do the same as ``client.connect``, for a gevent worker."""
    settings = settings or EngineSettings()
    keep = bool(options.pop("keep", False))

    def make() -> Launcher:
        return Launcher(bundle, settings, state_dir=state_dir, progress=progress, sleep=gevent.sleep, **options)

    return GeventEngine(make, stall_timeout=settings.stall_timeout, keep=keep)
