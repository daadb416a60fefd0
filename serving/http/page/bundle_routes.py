"""Routes that serve the page: ``/`` is its HTML, ``/page/…`` are its script, style sheet and icon.

The page's own requests are relative, so that it works behind a path prefix. ``POLICY`` is its Content-Security-Policy:
only files of this server, no inline code, and no string is ever parsed as HTML (``require-trusted-types-for``).
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

from ...frontend.answer import Answer
from ...frontend.operation import Auth, Request
from ...frontend.worker_state import WorkerState
from ...interface.errors import NotFound
from ..route import Route

BUNDLE = Path(__file__).parent / "bundle"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",  # a browser asks with the ETag, so that a new version is seen at once
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class BundleFile:
    body: bytes
    content_type: str
    etag: str


@functools.cache
def _files() -> dict[str, BundleFile]:
    """Return the files of the bundle by their path in it."""
    found = {}
    for path in BUNDLE.rglob("*"):
        if path.is_file():
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            found[path.relative_to(BUNDLE).as_posix()] = BundleFile(body, KINDS[path.suffix], etag)
    return found


def index(server: WorkerState, request: Request) -> Answer:
    return _answer(server, request, "index.html")


def asset(server: WorkerState, request: Request) -> Answer:
    return _answer(server, request, f"page/{request.name}")


def _answer(server: WorkerState, request: Request, path: str) -> Answer:
    """Respond with a file of the bundle. Raises ``NotFound`` for an unknown one, and if the page is turned off."""
    if not server.settings.page:
        raise NotFound("this server has no page (--no-page)")
    file = _files().get(path)
    if file is None:
        raise NotFound(f"the page has no file {path[:100]!r}")
    headers = HEADERS | {"ETag": file.etag}
    if file.etag in (request.headers.get("If-None-Match") or "").replace("W/", "").split(", "):
        return Answer(status=304, content_type=file.content_type, headers=headers)
    return Answer(body=file.body, content_type=file.content_type, headers=headers)


ROUTES = (
    Route(
        method="GET",
        path="/",
        handler=index,
        summary="The page: playground, usage, operations",
        auth=Auth.OPEN,
        produces=("text/html",),
    ),
    Route(
        method="GET",
        path="/page/<name>",
        handler=asset,
        summary="A file of the page",
        auth=Auth.OPEN,
        produces=("text/javascript", "text/css", "image/svg+xml"),
    ),
)
