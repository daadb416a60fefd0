"""The client for gevent workers: the loop is a greenlet, the queues are gevent's. The only file here that knows gevent.

It attaches to an engine that a supervisor keeps; starting processes is the master's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gevent
import gevent.queue
import zmq.green

from .client import RemoteEngine
from .launch import Attached


class GeventEngine(RemoteEngine):
    """``RemoteEngine`` on greenlets; to be made in the worker that uses it, after the fork."""

    backend: Any = zmq.green

    def _queue(self) -> Any:
        return gevent.queue.SimpleQueue()

    def _spawn(self, run: Callable[[], None]) -> Any:
        return gevent.spawn(run)


def attach(address: str, *, key_file: str | None = None, timeout: float = 60.0, stall_timeout: float = 60.0) -> Any:
    """As ``client.attach``, for a gevent worker."""

    def make() -> Attached:
        return Attached(address, key_file=key_file, timeout=timeout, sleep=gevent.sleep)

    return GeventEngine(make, stall_timeout=stall_timeout)
