"""Requests that a page in a browser could have made: refused by a server that asks for no keys, on every route."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.http.routes import ROUTES
from mlflow_llm.serving.http.wire.csrf import name_of
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.metering.accounts.keys import ANONYMOUS

CHAT = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
PLACES = [(route.method, route.path) for route in ROUTES]
FOREIGN = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://localhost:1"},
    {"Origin": "http://["},
    {"Origin": "http://[::1"},
    {"Origin": "http://localhost:port"},
    {"Origin": ""},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "nonsense"},
    {"Host": "evil.example"},
    {"Host": "evil.example:8000", "Origin": "http://evil.example:8000", "Sec-Fetch-Site": "same-origin"},
    {"Host": "localhost.evil.example"},
]
OWN = [
    {},
    {"Host": "127.0.0.1:8000"},
    {"Host": "[::1]:8000"},
    {"Host": "LOCALHOST."},
    {"Host": "localhost:8000", "Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"},
    {"Host": "localhost:8000", "Origin": "https://localhost:8000"},
    {"Sec-Fetch-Site": "none"},
]


class Everyone:
    """Keys that accept every caller."""

    def verify(self, secret: str, scope: str | None = None) -> object:
        return ANONYMOUS


@pytest.fixture(scope="module")
def client(make: Callable[..., WorkerState]) -> FlaskClient:
    """Return a client of one server for all routes: refused requests leave no state in it."""
    return create_app(make()).test_client()


@pytest.mark.parametrize(("method", "path"), PLACES, ids=[f"{method} {path}" for method, path in PLACES])
def test_no_route_answers_a_page_of_another_site(client: FlaskClient, method: str, path: str) -> None:
    """A foreign or malformed ``Origin``, ``Sec-Fetch-Site`` or ``Host`` is a 403 that names the header."""
    for headers in FOREIGN:
        answer = client.open(path.replace("<name>", "a").replace("<path:name>", "a"), method=method, headers=headers)
        assert answer.status_code == 403, (headers, answer.text)
        assert any(f"{name}: this server requires no keys" in answer.text for name in headers)


@pytest.mark.parametrize("headers", OWN)
def test_same_origin_pages_and_other_clients_pass(client: FlaskClient, headers: dict[str, str]) -> None:
    """Names of this machine, its own pages and clients that send none of these headers are served."""
    answer = client.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert answer.status_code == 200, answer.text


def test_allowed_hosts(make: Callable[..., WorkerState]) -> None:
    """``allowed_hosts`` are taken beside this machine's names, on whatever address the server listens."""
    for host in ("127.0.0.1", "0.0.0.0"):
        client = create_app(make(host=host, allowed_hosts=("llm.example",))).test_client()
        found = [
            client.get("/ping", headers={"Host": name}).status_code for name in ("LLM.example:80", "localhost", "x")
        ]
        assert found == [200, 200, 403]


def test_host_names_are_not_checked_off_loopback(make: Callable[..., WorkerState]) -> None:
    """A server that other machines reach takes any ``Host`` unless it was told its names, but no foreign ``Origin``."""
    client = create_app(make(host="0.0.0.0")).test_client()
    assert client.get("/ping", headers={"Host": "gpu-7.lan"}).status_code == 200
    assert client.get("/ping", headers={"Host": "gpu-7.lan", "Origin": "http://evil.example"}).status_code == 403


def test_no_csrf_guard_where_keys_are_required(make: Callable[..., WorkerState]) -> None:
    """No page has a key to send: a server that asks for them takes any name and site."""
    client = create_app(make(keys=Everyone())).test_client()
    headers = {"Authorization": "Bearer sk-1", "Host": "llm.example", "Origin": "https://app.example"}
    assert client.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain; application/json",
        "application/jsonp",
        "application/json; charset=latin-1",
        "application/json, text/plain",
        "\xff",
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations", "/api/2.0/serving-endpoints"])
def test_other_content_types_are_refused(client: FlaskClient, path: str, kind: str | None) -> None:
    """A content type that a page may send without a CORS preflight gets a 415 that names the accepted ones."""
    answer = client.post(path, data=b"{", headers={} if kind is None else {"Content-Type": kind})
    assert answer.status_code == 415, answer.text
    assert "Content-Type: " in answer.text


@pytest.mark.parametrize(
    "kind",
    ["application/json", "Application/JSON; charset=UTF-8", "application/vnd.x+json", "application/json;charset=utf8"],
)
def test_json_content_types_are_taken(client: FlaskClient, kind: str) -> None:
    """JSON by any of its names is read."""
    answer = client.post("/v1/chat/completions", data=b"{", content_type=kind)
    assert (answer.status_code, "body" in answer.text) == (400, True)


def test_the_page_loads_nothing_and_no_answer_is_sniffed(client: FlaskClient) -> None:
    """``/docs`` has a policy that allows its one style; no answer is taken for another kind than it says."""
    answer = client.get("/docs")
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "frame-ancestors 'none'" in policy
    for path in ("/docs", "/v1/models", "/nothing", "/metrics", "/ping"):
        assert client.get(path).headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("host", "name"),
    [("A.b:1", "a.b"), ("[::1]:80", "::1"), ("::1", ""), ("a:b", ""), ("", ""), ("[", ""), ("a..", "a")],
)
def test_host_names(host: str, name: str) -> None:
    """A name is a ``Host`` without port and brackets; what is malformed has none."""
    assert name_of(host) == name


@pytest.mark.parametrize("names", [("a b",), ("http://a",), ("",), "a"])
def test_malformed_host_names(names: object) -> None:
    """A setting that names no host is refused."""
    with pytest.raises(InvalidField, match="allowed_hosts"):
        ServerSettings.read({"allowed_hosts": names})
