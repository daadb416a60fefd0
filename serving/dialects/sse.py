"""Server-sent events: the only place that frames them.

Clients that split a stream with ``str.splitlines`` (httpx, requests with ``decode_unicode``, MLflow's Databricks
client) end a line at more characters than the format does. JSON escapes those below U+0020 anyway; the three others
are escaped here, so that no event's data contains one.
"""

from __future__ import annotations

from typing import Any

import msgspec

COMMENT = b": keep-alive\n\n"  # an event without data, for clients that parse the format
# U+0085, U+2028 and U+2029 in UTF-8, none of which can be a part of another character, and their escapes
LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
_encode = msgspec.json.Encoder().encode


def json_line(value: Any) -> bytes:
    """Encode ``value`` as JSON that is one line for every client."""
    data = _encode(value)
    return data if data.isascii() else without_line_ends(data)


def without_line_ends(data: bytes) -> bytes:
    """Escape the characters in JSON at which a client may end a line."""
    for raw, escaped in LINE_ENDS:
        if raw in data:
            data = data.replace(raw, escaped)
    return data


def event(value: Any, kind: str | None = None, *, space: bytes = b" ") -> bytes:
    """Encode one event with ``value`` as its data; ``kind`` is its type, if the dialect names types.

    ``space`` follows the colon of ``data:``.
    """
    data = b"data:" + space + json_line(value) + b"\n\n"
    return data if kind is None else b"event: " + kind.encode() + b"\n" + data
