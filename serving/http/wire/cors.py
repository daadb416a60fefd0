"""CORS: let pages of the configured origins call the server from a browser (Fetch Standard, "CORS protocol").

Callers send their key in a header, never in a cookie, so ``Access-Control-Allow-Credentials`` is never sent. Without
configured origins no page of another site may read an answer or send a key, because its preflight is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ...frontend.answer import Answer
from ...frontend.limits.rate_limit_headers import NOUNS, SOFT_EXCEEDED
from ...frontend.receipts import RECEIPT_HEADER
from ...interface.errors import MethodNotAllowed, PermissionDenied
from ...observability.access_record import REQUEST_ID
from .csrf import allows

ANY = "*"
MAX_AGE_SECONDS = 600  # seconds for which a browser may remember a preflight
HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(\s*,\s*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_LIMITED = sorted({noun for nouns in NOUNS.values() for noun in nouns})
EXPOSED = ", ".join(
    (
        REQUEST_ID,
        "request-id",
        "served-model-name",
        RECEIPT_HEADER,
        "Retry-After",
        "x-should-retry",
        "WWW-Authenticate",
        "Inference-Header-Content-Length",
        SOFT_EXCEEDED,
        *(f"x-ratelimit-{what}-{noun}" for noun in _LIMITED for what in ("limit", "remaining", "reset")),
    )
)


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    """Return whether a browser asks if a page may send a request."""
    return method == "OPTIONS" and "Origin" in headers and "Access-Control-Request-Method" in headers


def preflight(origins: tuple[str, ...], headers: Mapping[str, str], methods: Iterable[str]) -> Answer:
    """Answer a preflight for a path that has ``methods``. Raises ``PermissionDenied``, ``MethodNotAllowed``."""
    if not allows(origins, headers["Origin"]):
        now = ", ".join(origins) or "none"
        raise PermissionDenied(
            f"Origin: pages of other sites may not call this server; --cors-origin allows their origins (now {now})"
        )
    asked = headers["Access-Control-Request-Method"]
    if asked not in (allowed := sorted(methods)):
        raise MethodNotAllowed(f"Access-Control-Request-Method: {asked[:20]!r} is not one of {', '.join(allowed)}")
    found = {"Access-Control-Allow-Methods": ", ".join(allowed), "Access-Control-Max-Age": str(MAX_AGE_SECONDS)}
    names = headers.get("Access-Control-Request-Headers", "").strip()
    if HEADER_NAMES.fullmatch(names):  # repeated, because * would not stand for Authorization
        found["Access-Control-Allow-Headers"] = names
    return Answer(status=204, headers=found)


def headers_for(origins: tuple[str, ...], origin: str | None) -> dict[str, str]:
    """Return the headers by which a browser shows an answer to a page of ``origin``, if it may see it."""
    if not origins:
        return {}
    found = {} if ANY in origins else {"Vary": "Origin"}
    if not allows(origins, origin):
        return found
    shown = ANY if ANY in origins else str(origin)
    return found | {"Access-Control-Allow-Origin": shown, "Access-Control-Expose-Headers": EXPOSED}
