"""Wait for the first bytes of a stream, no longer at a time than its client and the proxies before it.

Proxies cut a response of which they have seen nothing for a minute, and a long prompt or an engine that loads may take
longer. So the bytes are made on a greenlet of their own, and the stream's own greenlet may say something meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import gevent

from .in_flight import ClientGone


class Patience(NamedTuple):
    """For how many seconds a stream's first bytes are waited for ``at_first``, and ``then`` before each sign of life.
    ``interrupt`` ends what makes the bytes (``InterruptibleIterator.interrupt``)."""

    at_first: float
    then: float
    interrupt: Callable[[BaseException], None]


class FirstBytes:
    """The first bytes of a stream, which ``make`` returns or fails to."""

    def __init__(self, make: Callable[[], bytes], patience: Patience) -> None:
        self._patience = patience
        self._making = gevent.spawn(_outcome, make)
        self._seconds = patience.at_first

    def are_ready(self) -> bool:
        """Wait for them as long as patience lasts, and return whether they are ready."""
        self._making.join(self._seconds)
        self._seconds = self._patience.then
        return bool(self._making.ready())

    def get(self) -> bytes:
        """Return the bytes, which are ready. Raises what ``make`` raised."""
        data, error = self._making.get()
        if error is not None:
            raise error
        return bytes(data)

    def abandon(self) -> None:
        """End the making of the bytes, if it goes on, because nobody wants them."""
        if not self._making.ready():
            self._patience.interrupt(ClientGone())
            self._making.join()


def _outcome(make: Callable[[], bytes]) -> tuple[bytes, BaseException | None]:
    """Return what ``make`` returned or raised: gevent would write the traceback of an error to the log."""
    try:
        return make(), None
    except BaseException as error:
        return b"", error
