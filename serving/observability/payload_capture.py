"""The texts of one request on their way to the payload log: what the record of a request keeps of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..dialects.openai.span_values import choices_of
from ..interface.payload_log import MAX_TEXT, PayloadLog, redacted_json
from ..interface.reply import Choice
from ..metering.usage.payloads import Payload

Reply = tuple[Choice, str | None]
"""A choice, and why it ended; None if it was cut off."""


@dataclass(slots=True, kw_only=True)
class Capture:
    """The request whose texts are to be logged. ``body`` is None if it is too long for the log.

    ``send`` takes what was captured when the request has ended. ``admitted`` is set when the request runs: those that
    are refused before are not logged. ``shadow_of`` is the id of the request that this one is a copy of, under which it
    is logged, without its body.
    """

    settings: PayloadLog
    tenant: str
    key_id: str
    body: bytes | None
    send: Callable[[Captured], None]
    admitted: bool = False
    shadow_of: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class Captured:
    """A finished request with its texts as they were received and sent; ``payload`` makes its row."""

    settings: PayloadLog
    row: Payload  # without its texts
    task: str
    body: bytes | None
    replies: Sequence[Reply]

    @property
    def size(self) -> int:
        """The memory that the texts take, roughly."""
        said = sum(len(choice.text) + len(choice.reasoning) for choice, _ in self.replies)
        called = sum(len(call.arguments) for choice, _ in self.replies for call in choice.calls)
        return len(self.body or b"") + said + called

    def payload(self) -> Payload:
        """Return the row for the log: its texts as JSON, redacted, and codes for those that are left out."""
        codes: list[str] = []
        request = self._request(codes)
        response = self._response(codes)
        return msgspec.structs.replace(self.row, request=request, response=response, codes=tuple(codes))

    def _request(self, codes: list[str]) -> str | None:
        if self.row.shadow:
            return None
        if self.body is None:
            codes.append("MAX_REQUEST_SIZE_EXCEEDED")
            return None
        try:
            text = self.body.decode()
            value = msgspec.json.decode(text)
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
            codes.append("REQUEST_NOT_JSON")
            return None
        if not self.settings.redact:
            return text
        return self._written(value, codes, "MAX_REQUEST_SIZE_EXCEEDED", names=True)

    def _response(self, codes: list[str]) -> str | None:
        if not self.replies:
            return None
        shown = choices_of(self.task, (choice for choice, _ in self.replies))
        choices = [{**one, "finish_reason": why} for one, (_, why) in zip(shown, self.replies, strict=True)]
        return self._written({"choices": choices}, codes, "MAX_RESPONSE_SIZE_EXCEEDED", names=False)

    def _written(self, value: Any, codes: list[str], too_long: str, *, names: bool) -> str | None:
        """Return ``value`` as JSON, redacted; None with the code ``too_long`` if that is too long for the log, and also
        if it fails, since what cannot be redacted is not kept."""
        try:
            if self.settings.redact:
                value = redacted_json(msgspec.to_builtins(value), self.settings.redact, names=names)
            encoded = msgspec.json.encode(value)
        except (ValueError, RecursionError):
            if "REDACTION_FAILED" not in codes:
                codes.append("REDACTION_FAILED")
            return None
        if len(encoded) > MAX_TEXT:
            codes.append(too_long)
            return None
        return encoded.decode()
