"""Wait for a confined process in a gevent worker: a greenlet lets other greenlets run; a thread just blocks."""

from __future__ import annotations

import select
from typing import Any

import gevent
import gevent.monkey
from gevent.hub import Waiter

from ..confined import use_wait

READ, WRITE = 1, 2  # the event loop's flags for "readable" and "writable"
_poll: Any = gevent.monkey.get_original("select", "poll")


def install() -> None:
    use_wait(wait)


def wait(fd: int, writing: bool, seconds: float) -> bool:
    """Implement ``confined.process.Wait``."""
    if isinstance(gevent.getcurrent(), gevent.Greenlet):
        return _green(fd, writing, seconds)
    poll = _poll()
    poll.register(fd, select.POLLOUT if writing else select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _green(fd: int, writing: bool, seconds: float) -> bool:
    hub = gevent.get_hub()
    waiter: Any = Waiter(hub)
    ready, timer = hub.loop.io(fd, WRITE if writing else READ), hub.loop.timer(seconds)
    ready.start(waiter.switch, True)
    timer.start(waiter.switch, False)
    try:
        return bool(waiter.get())
    finally:
        ready.stop()
        ready.close()
        timer.close()
