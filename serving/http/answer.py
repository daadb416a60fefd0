"""What goes back over HTTP, before a web framework turns it into its own response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..dialects.base import Dialect
from ..errors import LimitExceeded, ServingError, Unauthenticated
from . import rate_limit_headers

_encoder = msgspec.json.Encoder()
MANY = 16  # entries of a list


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``body`` is the whole of it, or an iterator whose ``close`` must be called."""

    status: int = 200
    body: bytes | Iterator[bytes] = b""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


def json_answer(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    return Answer(status=status, body=_encoded(value), headers=headers or {})


def _encoded(value: Any) -> bytes:
    """Entries of long lists one by one: in one call a thousand vectors would keep all other threads waiting."""
    if isinstance(value, dict):
        value = {key: _entries(entry) if isinstance(entry, list) else entry for key, entry in value.items()}
    return _encoder.encode(value)


def _entries(value: list[Any]) -> Any:
    if len(value) <= MANY:
        return value
    return msgspec.Raw(b"[" + b",".join([_encoder.encode(entry) for entry in value]) + b"]")


def error_answer(dialect: Dialect, error: ServingError) -> Answer:
    """``error`` in the dialect's own words, with the headers that HTTP asks for beside its status."""
    rendered = dialect.error(error)
    headers = dict(rendered.headers)
    if isinstance(error, LimitExceeded):
        headers |= rate_limit_headers.refused(error)
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    body = json.dumps(rendered.body, ensure_ascii=True).encode()
    return Answer(status=rendered.status, body=body, headers=headers)
