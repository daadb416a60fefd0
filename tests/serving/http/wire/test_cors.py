"""Requests of pages in a browser: which may be sent, and which answers may be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.http.routes import ROUTES
from mlflow_llm.serving.metering import Keys, Store

APP, OTHER = "https://app.example", "https://other.example"
CHAT = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
PATHS = sorted({route.path for route in ROUTES})
ASKED = "authorization, content-type, x-stainless-lang"


def preflight(client: FlaskClient, path: str, method: str = "POST", origin: str = APP, headers: str = ASKED) -> Any:
    """Ask as a browser does before a page's request."""
    sent = {"Origin": origin, "Access-Control-Request-Method": method, "Sec-Fetch-Site": "cross-site"}
    sent |= {"Access-Control-Request-Headers": headers} if headers else {}
    return client.options(path, headers=sent)


def allowed(answer: Any) -> str | None:
    found: str | None = answer.headers.get("Access-Control-Allow-Origin")
    assert "Access-Control-Allow-Credentials" not in answer.headers
    return found


@pytest.fixture(scope="module")
def client(make: Callable[..., WorkerState]) -> FlaskClient:
    return create_app(make(cors_origins=(APP, "http://localhost:3000"))).test_client()


@pytest.mark.parametrize("path", PATHS)
def test_every_route_has_a_preflight(client: FlaskClient, make: Callable[..., WorkerState], path: str) -> None:
    """It names the methods of the path and the headers that were asked for, without a key; a foreign origin gets a 403
    that says which are allowed."""
    place = path.replace("<path:", "<").replace("<", "").replace(">", "")
    methods = {route.method for route in ROUTES if route.path == path}
    for method in methods:
        answer = preflight(client, place, method)
        assert (answer.status_code, allowed(answer), answer.data) == (204, APP, b""), answer.text
        assert methods <= set(answer.headers["Access-Control-Allow-Methods"].split(", "))
        assert answer.headers["Access-Control-Allow-Headers"] == ASKED
        assert "Origin" in answer.headers["Vary"]
        refused = preflight(client, place, method, OTHER)
        assert (refused.status_code, allowed(refused)) == (403, None)
        assert f"--cors-origin allows their origins (now {APP}, http://localhost:3000)" in refused.text


def test_a_preflight_by_default(make: Callable[..., WorkerState]) -> None:
    """No origin is allowed, and the answer says what would allow one; nothing in an answer mentions origins."""
    client = create_app(make()).test_client()
    refused = preflight(client, "/v1/chat/completions")
    assert (refused.status_code, allowed(refused)) == (403, None)
    assert "--cors-origin allows their origins (now none)" in refused.json["error"]["message"]
    assert preflight(client, "/v1/messages").json["type"] == "error"
    plain = client.post("/v1/chat/completions", json=CHAT)
    assert not [name for name in dict(plain.headers) if name.startswith("Access-Control")]


def test_what_is_not_asked_rightly(client: FlaskClient) -> None:
    """A method that a path does not have is a 405, an unknown path a 404, an OPTIONS of nobody's page a 405."""
    assert preflight(client, "/v1/chat/completions", "PUT").status_code == 405
    assert preflight(client, "/nothing").status_code == 404
    assert client.options("/v1/chat/completions").status_code == 405
    assert "Access-Control-Allow-Headers" not in preflight(client, "/v1/models", "GET", headers="a\tb;c").headers
    assert preflight(client, "/v1/models", "GET", headers="").status_code == 204


def test_a_page_sends_and_reads(client: FlaskClient) -> None:
    """A page of an allowed origin is served by a server without keys, whole and streamed, and sees headers; others are
    refused as ever, and see nothing."""
    for body in (CHAT, CHAT | {"stream": True}, CHAT | {"max_tokens": -1}):
        answer = client.post("/v1/chat/completions", json=body, headers={"Origin": APP, "Sec-Fetch-Site": "cross-site"})
        assert answer.status_code == (400 if body["max_tokens"] == -1 else 200)
        assert allowed(answer) == APP
        exposed = answer.headers["Access-Control-Expose-Headers"].lower().split(", ")
        assert {"x-request-id", "served-model-name", "retry-after", "x-should-retry"} <= set(exposed)
        assert {"x-ratelimit-remaining-tokens", "x-ratelimit-reset-requests"} <= set(exposed)
    refused = client.post("/v1/chat/completions", json=CHAT, headers={"Origin": OTHER})
    assert (refused.status_code, allowed(refused)) == (403, None)
    assert allowed(client.get("/nothing", headers={"Origin": APP})) == APP
    forged = client.post("/v1/chat/completions", json=CHAT, headers={"Origin": APP, "Host": "evil.example"})
    assert forged.status_code == 403


def test_a_page_with_its_key(make: Callable[..., WorkerState], tmp_path: Path) -> None:
    """With keys: the preflight needs none, the request does, and a page may read why it was refused."""
    store = Store(f"sqlite:///{tmp_path}/ledger.db")
    keys = Keys(store)
    secret, _ = keys.create("acme")
    client = create_app(make(keys=keys, cors_origins=(APP,))).test_client()
    assert preflight(client, "/v1/chat/completions").status_code == 204
    refused = client.post("/v1/chat/completions", json=CHAT, headers={"Origin": APP})
    assert (refused.status_code, allowed(refused)) == (401, APP)
    served = client.post(
        "/v1/chat/completions", json=CHAT, headers={"Origin": APP, "Authorization": f"Bearer {secret}"}
    )
    assert (served.status_code, allowed(served)) == (200, APP)
    store.close()


def test_every_origin(make: Callable[..., WorkerState]) -> None:
    """``*`` is any page, also one without an origin of its own (a file), and answers do not vary."""
    client = create_app(make(cors_origins=("*",))).test_client()
    for origin in (APP, OTHER, "null"):
        assert allowed(preflight(client, "/v1/chat/completions", origin=origin)) == "*"
        answer = client.post("/v1/chat/completions", json=CHAT, headers={"Origin": origin})
        assert (answer.status_code, allowed(answer), "Vary" in answer.headers) == (200, "*", False)
