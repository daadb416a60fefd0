"""How long a client may take to send: gunicorn's parser reads every head and every body through ``Arrivals``.

Without it each byte would have a time of its own, and a client that sends one now and then would hold its connection
for as long as it likes, before anyone asks it for a key.
"""

from __future__ import annotations

from time import monotonic
from typing import Any, Literal

from gunicorn.http.errors import ParseException

RATE = 2**10  # bytes of a body that pay for a second: the slowest of honest uploads are faster
MOMENT = 0.001  # seconds: what is there already is taken, however late


class TooSlow(ParseException):
    """A head or a body that did not arrive in its time. Not a ``TimeoutError``: gunicorn would read on behind one."""


class Arrivals:
    """A client's socket for gunicorn's parser; ``plain`` is the socket itself, for all else.

    ``io_timeout`` (seconds) is what a client may be waited for: for the first byte of a head, after which the
    connection ends without a word (``TimeoutError``); then for all of the rest of the head; then for a body, where
    ``RATE`` bytes give a second back (``TooSlow``). Only waiting counts, so a busy server is held against nobody, and
    nothing has to be stopped while a request is answered.
    """

    def __init__(self, plain: Any, io_timeout: float) -> None:
        self.plain = plain
        self._limit = self._left = io_timeout
        self._part: Literal["", "head", "body"] = ""

    def expect_head(self) -> None:
        self._part, self._left = "", self._limit

    def expect_body(self) -> None:
        self._part, self._left = "body", self._limit

    def recv(self, size: int) -> bytes:
        self.plain.settimeout(max(self._left, MOMENT))
        began = monotonic()
        try:
            data: bytes = self.plain.recv(size)
        except TimeoutError:
            if not self._part:
                raise
            raise self._too_slow() from None
        finally:
            self.plain.settimeout(self._limit)
        self._count(len(data), monotonic() - began)
        return data

    def _count(self, size: int, waited: float) -> None:
        if not self._part:
            self._part = "head"  # whose time begins with its first byte
        elif self._part == "head":
            self._left -= waited
        else:
            self._left = min(self._left - waited + size / RATE, self._limit)

    def _too_slow(self) -> TooSlow:
        if self._part == "head":
            return TooSlow(f"the head did not arrive within {self._limit:g} seconds")
        return TooSlow(f"the body arrives too slowly: more than {self._limit:g} seconds behind {RATE} bytes a second")

    def close(self) -> None:
        self.plain.close()
