"""Wait for a confined process, a connection, a look-up of a host or another request's transaction in a process with
gevent: a greenlet lets other greenlets run; a thread just blocks."""

from __future__ import annotations

import select
import socket
from typing import Any

import gevent
import gevent.monkey
from gevent.event import Event
from gevent.hub import Waiter

from ..metering.store.group_commit import use_signal
from ..sandbox import use_wait
from ..tasks.media.fetch import use_resolve

READ, WRITE = 1, 2  # the event loop's flags for "readable" and "writable"
_poll: Any = gevent.monkey.get_original("select", "poll")
_getaddrinfo: Any = gevent.monkey.get_original("socket", "getaddrinfo")


def install() -> None:
    use_wait(wait)
    use_resolve(resolve)
    use_signal(Event)


def resolve(host: str, port: int, seconds: float) -> list[Any]:
    """Look up a host as ``tasks.media_fetch.system_resolve`` does. A greenlet waits for at most ``seconds``."""
    if not isinstance(gevent.getcurrent(), gevent.Greenlet):
        return list(_getaddrinfo(host, port, type=socket.SOCK_STREAM))
    with gevent.Timeout(seconds, TimeoutError):
        return list(gevent.get_hub().resolver.getaddrinfo(host, port, type=socket.SOCK_STREAM))


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
