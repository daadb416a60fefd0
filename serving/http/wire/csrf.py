"""CSRF and DNS-rebinding guard: refuse requests that a page of another site could make its visitor's browser send.

A server without keys trusts every client that reaches it, and a browser can reach this machine's loopback addresses on
behalf of any page that it shows. There are two attacks: a page sends requests from its own site (CSRF), which
``Origin`` and ``Sec-Fetch-Site`` reveal; or the page's host name is changed to resolve to this machine (DNS rebinding),
which ``Host`` reveals. Bodies must also be JSON: a page may not send JSON to another site without a preflight request
(CORS), which ``cors`` answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from werkzeug.http import parse_options_header

from ...control.listen_settings import is_loopback
from ...dialects.base import JSON
from ...interface.errors import PermissionDenied, UnsupportedMediaType

ORIGIN = re.compile(r"https?://([^/?#@\s\\]+)", re.IGNORECASE)
OWN_SITE = ("same-origin", "none")  # none: the user typed the address or chose a bookmark
WITH_BODY = ("POST", "PUT", "PATCH")


def check_cross_site(
    environ: Mapping[str, Any], listens: str, allowed: tuple[str, ...], origins: tuple[str, ...] = ()
) -> None:
    """Raise ``PermissionDenied`` for a request that a page of another site may have sent.

    ``listens`` is the address of the listener to which it came; ``allowed`` are further host names, and ``origins``
    those whose pages may call the server.
    """
    site = environ.get("HTTP_SEC_FETCH_SITE")
    host = environ.get("HTTP_HOST")
    origin = environ.get("HTTP_ORIGIN")
    if not allows(origins, origin):
        if site is not None and site.strip().lower() not in OWN_SITE:
            raise PermissionDenied(f"Sec-Fetch-Site: {_WHY}pages of other sites")
        if origin is not None and not _is_of(origin, host):
            raise PermissionDenied(f"Origin: {_WHY}pages of other sites")
    if host is not None and not _is_ours(name_of(host), listens, allowed):
        raise PermissionDenied(
            f"Host: {_WHY}names other than {', '.join((_OWN, *allowed))}; --allowed-host adds those of a proxy"
        )


def allows(origins: tuple[str, ...], origin: str | None) -> bool:
    """Return whether a page of ``origin`` may call a server that allows ``origins``; ``*`` is every origin."""
    return origin is not None and ("*" in origins or origin.lower() in origins)


_WHY = "this server requires no keys, so it refuses requests from "
_OWN = "this machine's own"


def _is_of(origin: str, host: str | None) -> bool:
    found = ORIGIN.fullmatch(origin.strip())
    return found is not None and host is not None and found[1].lower() == host.lower()


def name_of(host: str) -> str:
    """Return the name in a ``Host`` header, without the port and the brackets of an address; "" if malformed."""
    found = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^\[\]:]*))(?::[0-9]*)?", host.strip())
    return (found[1] or found[2] or "").lower().rstrip(".") if found else ""


def _is_ours(name: str, listens: str, allowed: tuple[str, ...]) -> bool:
    """Return whether ``name`` may mean this server. Every name passes unless the server listens on loopback or
    ``allowed`` is set, because otherwise the server's names are not known."""
    if not allowed and not is_loopback(listens):
        return True
    return is_loopback(name) or name == listens.lower() or name in [host.lower() for host in allowed]


def check_content_type(environ: Mapping[str, Any], taken: tuple[str, ...] = (JSON,)) -> None:
    """Raise ``UnsupportedMediaType`` unless the body's ``Content-Type`` is in ``taken``; JSON must be UTF-8.

    This guards against CSRF: a browser posts these types to another site only after a preflight request (CORS). The
    types that it posts without one, text/plain and those of forms, must not be in ``taken``, with two exceptions, for
    which only the check of ``Origin`` protects: "" accepts a body without a ``Content-Type``, which Triton's clients
    send, and uploads are multipart/form-data by OpenAI's protocol.
    """
    if environ["REQUEST_METHOD"] not in WITH_BODY:
        return
    given = environ.get("CONTENT_TYPE", "")
    kind, options = parse_options_header(given)
    kind = kind.lower()
    if is_json(kind) and JSON in taken:
        charset = options.get("charset", "utf-8")
        if charset.lower() in ("utf-8", "utf8"):
            return
        raise UnsupportedMediaType(f"Content-Type: the charset {charset[:40]!r} is not supported; JSON is UTF-8")
    if kind in taken:
        return
    problem = f"{given[:80]!r} is not allowed" if given else "is missing"
    raise UnsupportedMediaType(
        f"Content-Type: {problem}; send {' or '.join(filter(None, taken))} (curl: -H 'Content-Type: {taken[0]}')"
    )


def is_json(kind: str) -> bool:
    """Return whether a media type, in lower case, is JSON or has the suffix ``+json``."""
    subtype = kind.removeprefix("application/")
    return subtype != kind and (subtype == "json" or subtype.endswith("+json"))
