"""A gRPC call in the form that the server's code expects: metadata as headers, its end as a client that has gone."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import grpc

from ..dialects.errors import retry_headers
from ..dialects.kserve.dialect import message_of
from ..frontend.invoke import TIMEOUT_HEADER
from ..frontend.streams.in_flight import ClientGone, InterruptibleIterator
from ..interface.errors import ServingError
from ..observability.access_record import REQUEST_ID
from .loop import Loop
from .statuses import status_of

MAX_DEADLINE_SECONDS = 10**8  # seconds: a longer time remaining means that no deadline was set


class Metadata:
    """A call's metadata as ``dialects.base.Headers``, with the time left until its deadline as the timeout header."""

    def __init__(self, given: Mapping[str, str], seconds_left: float | None) -> None:
        self._given = given
        self._left = None if seconds_left is None or seconds_left > MAX_DEADLINE_SECONDS else max(seconds_left, 1e-6)

    def get(self, name: str, /) -> str | None:
        found = self._given.get(name.lower())
        if name != TIMEOUT_HEADER or self._left is None:
            return found
        own = float(found) if found is not None and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", found) else None
        return found if found is not None and (own is None or own < self._left) else f"{self._left:.6f}"


class Call:
    """One call. If it ends before its reply (cancelled, past its deadline, cut off), what it runs is interrupted."""

    def __init__(self, context: grpc.ServicerContext, loop: Loop) -> None:
        self.context = context
        self._pulls: list[InterruptibleIterator[Any]] = []
        self.is_over = False
        given = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        self.headers = Metadata(given, context.time_remaining())
        self.address = address_of(context.peer())
        if not context.add_callback(lambda: loop.soon(self._interrupt)):
            self.is_over = True

    def _interrupt(self) -> None:
        self.is_over = True
        for pull in self._pulls:
            pull.interrupt(ClientGone())

    @contextlib.contextmanager
    def watch(self, pull: InterruptibleIterator[Any]) -> Iterator[None]:
        """Interrupt ``pull`` when the call ends. Call this in the loop."""
        self._pulls.append(pull)
        if self.is_over:
            pull.interrupt(ClientGone())
        try:
            yield
        finally:
            self._pulls.remove(pull)

    def send_trailers(self, headers: Mapping[str, str]) -> None:
        """Send as trailers what would be response headers over HTTP."""
        found = [(name.lower(), value) for name, value in headers.items() if value.isascii()]
        with contextlib.suppress(ValueError):  # the call has already ended
            self.context.set_trailing_metadata(found)

    def abort(self, error: ServingError, request_id: str = "", headers: Mapping[str, str] | None = None) -> None:
        """End the call with the status of ``error``. Always raises, as gRPC's ``abort`` does."""
        named = {REQUEST_ID: request_id} if request_id else {}
        self.send_trailers({**(headers or {}), **named, **retry_headers(error)})
        self.context.abort(status_of(error), message_of(error))


def address_of(peer: str) -> str:
    """Return the address in ``ipv4:10.0.0.7:51234`` or ``ipv6:[::1]:51234``; "" for another kind of peer."""
    kind, _, place = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    return place.rpartition(":")[0].replace("%5B", "[").replace("%5D", "]").strip("[]")
