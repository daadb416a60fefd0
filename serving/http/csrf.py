"""CSRF and DNS-rebinding guard: what another site's page could make its visitor's browser send is refused.

A server without keys trusts every client that reaches it, and a browser reaches this machine's loopback addresses for
every page that it shows. Two ways lead there: requests from the page's own site (CSRF), which ``Origin`` and
``Sec-Fetch-Site`` show, and a name of the page's own that comes to mean this machine (DNS rebinding), which ``Host``
shows. Bodies have to be JSON besides: no page may send that without a preflight request, which is refused here (CORS).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from werkzeug.http import parse_options_header

from ..control.listen_settings import is_loopback
from ..dialects.base import JSON
from ..errors import PermissionDenied, UnsupportedMediaType

ORIGIN = re.compile(r"https?://([^/?#@\s\\]+)", re.IGNORECASE)
OWN_SITE = ("same-origin", "none")  # none: typed, or chosen by the user
WITH_BODY = ("POST", "PUT", "PATCH")


def check_cross_site(environ: Mapping[str, Any], listens: str, allowed: tuple[str, ...]) -> None:
    """Raises ``PermissionDenied`` for a request that a page of another site may have made.

    ``listens`` is the address that it came to, ``allowed`` are names beside it.
    """
    site = environ.get("HTTP_SEC_FETCH_SITE")
    if site is not None and site.strip().lower() not in OWN_SITE:
        raise PermissionDenied(f"Sec-Fetch-Site: {_WHY}pages of other sites")
    host = environ.get("HTTP_HOST")
    origin = environ.get("HTTP_ORIGIN")
    if origin is not None and not _is_of(origin, host):
        raise PermissionDenied(f"Origin: {_WHY}pages of other sites")
    if host is not None and not _is_ours(name_of(host), listens, allowed):
        raise PermissionDenied(
            f"Host: {_WHY}another name than {', '.join((_OWN, *allowed))}; --allowed-host adds those of a proxy"
        )


_WHY = "this server asks for no keys, so it takes no requests from "
_OWN = "this machine's own"


def _is_of(origin: str, host: str | None) -> bool:
    found = ORIGIN.fullmatch(origin.strip())
    return found is not None and host is not None and found[1].lower() == host.lower()


def name_of(host: str) -> str:
    """A ``Host`` without its port, and an address without its brackets; "" where it is malformed."""
    found = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^\[\]:]*))(?::[0-9]*)?", host.strip())
    return (found[1] or found[2] or "").lower().rstrip(".") if found else ""


def _is_ours(name: str, listens: str, allowed: tuple[str, ...]) -> bool:
    """Names are checked where they are known: on loopback, which has no others, and where the settings name them."""
    if not allowed and not is_loopback(listens):
        return True
    return is_loopback(name) or name == listens.lower() or name in [host.lower() for host in allowed]


def check_content_type(environ: Mapping[str, Any], taken: tuple[str, ...] = (JSON,)) -> None:
    """Raises ``UnsupportedMediaType`` for a body that is not said to be of a type in ``taken``; JSON is in UTF-8.

    No browser posts any of them to another site without asking that site first (CORS), so this is a guard against CSRF:
    the types that it does post so, text/plain and those of forms, belong in no ``taken``. "" takes a body of which
    nothing is said, as Triton's clients send them; a page can post that too, and there ``Origin`` alone guards."""
    if environ["REQUEST_METHOD"] not in WITH_BODY:
        return
    given = environ.get("CONTENT_TYPE", "")
    kind, options = parse_options_header(given)
    kind = kind.lower()
    if is_json(kind) and JSON in taken:
        charset = options.get("charset", "utf-8")
        if charset.lower() in ("utf-8", "utf8"):
            return
        raise UnsupportedMediaType(f"Content-Type: the charset {charset[:40]!r} is not taken; JSON is UTF-8")
    if kind in taken:
        return
    problem = f"{given[:80]!r} is not taken" if given else "is missing"
    raise UnsupportedMediaType(
        f"Content-Type: {problem}; send {' or '.join(filter(None, taken))} (curl: -H 'Content-Type: {taken[0]}')"
    )


def is_json(kind: str) -> bool:
    """Whether a media type in lower case is JSON's or one that is written in JSON."""
    subtype = kind.removeprefix("application/")
    return subtype != kind and (subtype == "json" or subtype.endswith("+json"))
