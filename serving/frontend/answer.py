"""The type of HTTP responses, independent of the web framework, which converts them to its own type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..dialects import Dialect
from ..dialects.json_body import json_bytes
from ..interface.errors import LimitExceeded, ServingError, Unauthenticated
from .limits import rate_limit_headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response. ``body`` is the whole body, or an iterator whose ``close`` must be called."""

    status: int = 200
    body: bytes | Iterator[bytes] = b""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


def json_answer(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    return Answer(status=status, body=json_bytes(value), headers=headers or {})


def error_answer(dialect: Dialect, error: ServingError) -> Answer:
    """Return ``error`` in the dialect's form, with the headers that belong to its status."""
    encoded = dialect.error(error)
    headers = dict(encoded.headers)
    if isinstance(error, LimitExceeded):
        headers |= rate_limit_headers.refused(error)
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return Answer(status=encoded.status, body=encoded.body, content_type=encoded.content_type, headers=headers)
