"""Whatever stands in headers and queries, no answer is a 5xx: hypothesis looks for what is."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from flask.testing import FlaskClient
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.http.management.paths import USAGE
from mlflow_llm.serving.http.management.usage import USAGE_QUERY
from mlflow_llm.serving.http.routes import ROUTES
from mlflow_llm.serving.metering import Keys, Ledger, Store

CHAT = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
NAMES = (
    "Origin",
    "Sec-Fetch-Site",
    "Authorization",
    "X-Api-Key",
    "Anthropic-Version",
    "Content-Type",
    "Content-Encoding",
    "X-Request-Timeout",
    "X-Request-Id",
    "X-Sticky-Key",
    "traceparent",
    "tracestate",
    "Accept",
    "Range",
    "If-Modified-Since",
    "If-None-Match",
    "Cookie",
    "X-Forwarded-For",
    "X-Forwarded-Proto",
    "X-HTTP-Method-Override",
)
# what a parser lets through: no control characters, bytes as latin-1
VALUES = st.one_of(
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=60),
    st.from_regex(r"https?://[\[\]:@a-z0-9./%-]{0,30}", fullmatch=True),
    st.sampled_from(["http://[", "null", "Bearer ", "Bearer sk-1", "1e999", "9" * 400, "bytes=0-", "00-" + "f" * 60]),
)
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
NUMBERS = st.integers(-(2**70), 2**70).map(str)
CURSORS = st.tuples(st.one_of(st.integers(), st.floats(), st.none()), st.text(max_size=9)).map(
    lambda found: base64.urlsafe_b64encode(json.dumps(found).encode()).decode()
)
MOMENTS = st.datetimes().map(str) | st.dates().map(str) | st.datetimes(timezones=st.timezones()).map(str)
QUERIES = st.dictionaries(
    st.sampled_from([*USAGE_QUERY, "unknown"]),
    st.one_of(TEXTS, NUMBERS, CURSORS, MOMENTS, *(st.just(v) for q in USAGE_QUERY.values() for v in q.get("enum", ()))),
    max_size=4,
)
OFTEN = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def keyed(
    make: Callable[..., WorkerState], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[FlaskClient, str]]:
    """Return a client of a server with keys and a ledger, and the secret of a key with all scopes."""
    place: Path = tmp_path_factory.mktemp("fuzz")
    store = Store(f"sqlite:///{place}/serving.db")
    secret, _ = Keys(store).create(tenant="team", scopes=("invoke", "manage", "usage"))
    ledger = Ledger(store, state_dir=place)
    managed = EndpointStore(store, locate=lambda entities: ())
    server = make(keys=Keys(store), refusals_per_minute=0, ledger=ledger, endpoint_store=managed)
    yield create_app(server).test_client(), secret
    ledger.close()
    store.close()


@pytest.fixture(scope="module")
def open_to_all(make: Callable[..., WorkerState]) -> FlaskClient:
    return create_app(make(refusals_per_minute=0)).test_client()


@OFTEN
@given(headers=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), route=st.sampled_from(ROUTES))
@example(headers={"Origin": "http://["}, route=ROUTES[0])
def test_headers(open_to_all: FlaskClient, headers: dict[str, str], route: object) -> None:
    """Every route of a server without keys answers any headers with a status below 500."""
    check_headers(open_to_all, headers, route)


def check_headers(client: FlaskClient, headers: dict[str, str], route: object) -> None:
    path = route.path.replace("<name>", "assistant").replace("<path:name>", "assistant")
    body = {"json": CHAT} if route.method == "POST" else {}
    answer = client.open(path, method=route.method, headers=headers, **body)
    assert answer.status_code < 500, (path, headers, answer.text)
    answer.close()


@OFTEN
@given(headers=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), route=st.sampled_from(ROUTES))
def test_headers_beside_a_key(keyed: tuple[FlaskClient, str], headers: dict[str, str], route: object) -> None:
    """Every route of a server with keys answers any headers with a status below 500."""
    client, secret = keyed
    check_headers(client, {"Authorization": f"Bearer {secret}"} | headers, route)


def cursor(started_ms: int, request_id: str = "a") -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode((started_ms, request_id))).decode()


@OFTEN
@given(query=QUERIES)
@example(query={"cursor": cursor(2**64 - 1)})
@example(query={"cursor": cursor(2**63)})
@example(query={"cursor": cursor(-(2**63) - 1)})
@example(query={"cursor": cursor(1, "\0")})
@example(query={"cursor": "é"})
@example(query={"start": "0001-01-01T00:00:00+23:59"})
@example(query={"end": "9999-12-31T23:59:59-23:59"})
def test_queries_of_usage(keyed: tuple[FlaskClient, str], query: dict[str, str]) -> None:
    """Every query is answered or refused by a 400 that names the parameter."""
    client, secret = keyed
    asked = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
    answer = client.get(f"{USAGE}?{asked}", headers={"Authorization": f"Bearer {secret}"})
    assert answer.status_code in (200, 400), (query, answer.text)
    if answer.status_code == 400:
        assert any(answer.json["message"].startswith(f"{name}:") for name in query)
    answer.close()


@OFTEN
@given(name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_names_in_paths(keyed: tuple[FlaskClient, str], name: str) -> None:
    """Every endpoint name in a path is answered with a status below 500."""
    client, secret = keyed
    for route in ROUTES:
        if "<" in route.path and route.method in ("GET", "DELETE"):
            path = route.path.replace("<name>", quote(name, safe="")).replace("<path:name>", quote(name))
            answer = client.open(path, method=route.method, headers={"Authorization": f"Bearer {secret}"})
            assert answer.status_code < 500, (path, answer.text)
