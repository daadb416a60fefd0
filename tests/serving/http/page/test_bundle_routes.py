"""The files of the page as the server sends them: their headers, their size, and how to turn them off."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable

import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.http.page.bundle_routes import BUNDLE

MAX_GZIP_BYTES = 150_000
FILES = sorted(path.relative_to(BUNDLE).as_posix() for path in BUNDLE.rglob("*") if path.is_file())


def test_every_file_that_the_page_names_is_served(client: FlaskClient) -> None:
    """The HTML names its files relative to itself, each is served with its media type, and no code is inline."""
    page = client.get("/")
    assert (page.status_code, page.content_type) == (200, "text/html; charset=utf-8")
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert {"./page/app.js", "./page/app.css", "./page/icon.svg"} <= set(named)
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page.text)
    kinds = {name: client.get(f"/{name.removeprefix('./')}").content_type for name in named if name.startswith("./")}
    assert kinds["./page/app.js"] == "text/javascript; charset=utf-8"
    assert kinds["./page/app.css"] == "text/css; charset=utf-8"
    assert kinds["./page/icon.svg"] == "image/svg+xml"


@pytest.mark.parametrize("name", FILES)
def test_each_file_has_a_strict_policy(client: FlaskClient, name: str) -> None:
    """Each file forbids inline code, other hosts, frames and strings as HTML."""
    answer = client.get("/" if name == "index.html" else f"/{name}")
    policy = answer.headers["Content-Security-Policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= set(policy)
    assert "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_a_known_version_is_not_sent_again(client: FlaskClient) -> None:
    """A browser that has a file gets a 304 without a body, and the file again if it has another version."""
    first = client.get("/page/app.js")
    known = client.get("/page/app.js", headers={"If-None-Match": f'"other", W/{first.headers["ETag"]}'})
    assert (known.status_code, known.data) == (304, b"")
    assert known.headers["ETag"] == first.headers["ETag"]
    assert client.get("/page/app.js", headers={"If-None-Match": '"other"'}).data == first.data


@pytest.mark.parametrize("name", ["none.js", "..%2Findex.html", "%2e%2e", "app.js%00"])
def test_other_files_are_not_served(client: FlaskClient, name: str) -> None:
    """Only files of the bundle have a path: another name is a 404."""
    assert client.get(f"/page/{name}").status_code == 404


def test_the_page_can_be_turned_off(make: Callable[..., WorkerState]) -> None:
    """With the setting ``page`` off, ``/`` and its files are a 404 that names the option; the API stays."""
    client = create_app(make(page=False)).test_client()
    for path in ("/", "/page/app.js"):
        answer = client.get(path)
        assert (answer.status_code, "--no-page" in answer.json["message"]) == (404, True)
    assert client.get("/v1/models").status_code == 200
    assert ServerSettings().page


def test_the_bundle_is_small_and_asks_nobody_else() -> None:
    """All files together have at most 150 kB gzip, and name no other host (but the names of XML's namespaces)."""
    found = {name: (BUNDLE / name).read_bytes() for name in FILES}
    assert sum(len(gzip.compress(body)) for body in found.values()) <= MAX_GZIP_BYTES
    hosts = {host for body in found.values() for host in re.findall(rb"https?://([\w.-]+)", body)}
    assert hosts <= {b"www.w3.org"}
