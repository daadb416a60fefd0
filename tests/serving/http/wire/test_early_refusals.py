"""Refusals before a body is read: exhausted limits, too many refusals and too much memory in use."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.frontend import invoke
from mlflow_llm.serving.frontend.limits.memory_budget import SMALL_BYTES, MemoryBudget
from mlflow_llm.serving.frontend.limits.refusal_limit import RefusalLimit
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.errors import LimitExceeded, Overloaded, Unavailable
from mlflow_llm.serving.metering import Keys, Ledger, Limits, Price, Store
from mlflow_llm.serving.modes import PayPerToken
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoints

CHAT = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
LARGE = CHAT | {"messages": [{"role": "user", "content": " " * 3000}], "max_tokens": 1}


class Unread(io.RawIOBase):
    """A request body whose reading fails the test."""

    def read(self, size: int = -1) -> bytes:
        raise AssertionError("the body was read")


class Place:
    def __init__(self, server: WorkerState, store: Store, clock: list[float]) -> None:
        self.server, self.store, self.clock = server, store, clock
        self.keys, self.limits = Keys(store), Limits(store)
        self.change()
        self.secret, self.key = self.keys.create("acme")

    def change(self, **parts: Any) -> None:
        """Replace ``parts`` of the server."""
        self.server = dataclasses.replace(self.server, **parts)
        self.client: FlaskClient = create_app(self.server).test_client()

    def ask(
        self, body: Any = CHAT, secret: str | None = None, path: str = "/v1/chat/completions", **environ: Any
    ) -> Any:
        """Send a request; ``body`` None announces a large one that cannot be read."""
        headers = {"Authorization": f"Bearer {secret or self.secret}", "Content-Type": "application/json"}
        if body is None:
            unread = {"wsgi.input": Unread(), "CONTENT_LENGTH": str(10 * 2**20)}
            return self.client.post(path, headers=headers, environ_overrides=unread | environ)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(path, data=data, headers=headers, environ_overrides=environ)


@pytest.fixture
def place(make: Callable[..., WorkerState], tmp_path: Path) -> Iterator[Place]:
    store = Store(f"sqlite:///{tmp_path}/ledger.db")
    clock = [1_800_000_000.0]
    ledger = Ledger(store, state_dir=tmp_path, clock=lambda: clock[0])
    server = make(keys=Keys(store), mode=PayPerToken(ledger), offload_bytes=2048, refusals_per_minute=30, ledger=ledger)
    ledger.prices.set("*", Price(input=1_000_000, output=10_000_000), effective=clock[0])
    yield Place(server, store, clock)
    ledger.close()
    store.close()


def subject(place: Place, scope: str) -> str:
    return {"key": place.key.key_id, "tenant": "acme"}.get(scope, "assistant")


@pytest.mark.parametrize("scope", ["key", "tenant", "endpoint", "user"])
@pytest.mark.parametrize("kind", ["itpm", "otpm", "qpm", "qph", "budget", "budget_day"])
def test_a_used_up_limit_refuses_before_the_body_is_read(place: Place, kind: str, scope: str) -> None:
    """If a limit is used up a large body is refused unread, with the answer of an admission."""
    used = place.ask(CHAT | {"ignore_eos": True}).json["usage"]
    tokens = {"itpm": used["prompt_tokens"], "otpm": used["completion_tokens"], "qpm": 1, "qph": 1}
    value = tokens.get(kind, used["prompt_tokens"] + 10 * used["completion_tokens"])
    place.limits.set(scope, subject(place, scope), kind, value)
    if kind not in ("budget", "budget_day"):
        place.ask(LARGE | {"messages": CHAT["messages"]})  # makes the window; it is refused
    else:
        place.ask(CHAT)
    early = place.ask(None)
    small = place.ask(CHAT)
    assert early.status_code == small.status_code == (403 if kind == "budget" else 429)
    assert early.json["error"]["message"].startswith(f"{kind}: the {scope}'s limit")
    assert early.headers.get("Retry-After") == small.headers.get("Retry-After")


def test_requests_in_flight_refuse_before_the_body_is_read(place: Place) -> None:
    """Used-up concurrency refuses a request unread, and once a place is free it is taken."""
    place.limits.set("key", place.key.key_id, "in_flight", 1)
    stream = place.ask(CHAT | {"stream": True, "max_tokens": 2000, "ignore_eos": True})
    next(stream.response)
    assert place.ask(None).json["error"]["message"].startswith("in_flight: the key's limit is 1")
    stream.close()
    assert place.ask(LARGE).status_code == 200


def test_an_early_refusal_reserves_nothing(place: Place) -> None:
    """A limit with room for the request lets a large body in; one that costs nothing passes a budget that is spent; an
    embeddings request, which generates nothing, passes a limit of output."""
    place.limits.set("key", place.key.key_id, "itpm", 4000)
    assert place.ask(LARGE).status_code == 200
    place.limits.remove("key", place.key.key_id, "itpm")
    place.limits.set("tenant", "acme", "otpm", 0)
    embed = {"model": "assistant", "input": " " * 3000}
    assert place.ask(embed, path="/v1/embeddings").status_code == 200
    assert place.ask(embed, path="/serving-endpoints/assistant/invocations").status_code == 200
    place.limits.remove("tenant", "acme", "otpm")
    place.limits.set("tenant", "acme", "budget", 1)
    place.server.ledger.prices.set("*", Price(input=0, output=0), effective=place.clock[0] + 1)
    place.clock[0] += 60
    assert place.ask(LARGE).status_code == 200


def test_an_endpoint_that_the_body_names(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """If only the body names the endpoint, the endpoint's limits refuse the request before it is tokenised."""
    (one,) = place.server.endpoints
    place.change(endpoints=ServedEndpoints(one, dataclasses.replace(one, endpoint="other", entity="model-2")))
    place.limits.set("endpoint", "assistant", "qpm", 0)
    monkeypatch.setattr(invoke, "prepare", None)
    assert place.ask(LARGE).status_code == 403
    assert place.ask(None, path="/serving-endpoints/assistant/invocations").status_code == 403


def test_a_store_that_is_away_refuses_before_the_body_is_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the store is unavailable a large body is refused unread."""
    assert place.ask().status_code == 200

    def away(*_: Any, **__: Any) -> None:
        raise Unavailable("the metering store does not answer", retry_after=1.0)

    monkeypatch.setattr(place.server.ledger.store, "read", away)
    assert place.ask(None).status_code == 503


def test_a_keys_refusals_are_limited(place: Place) -> None:
    """The thirty-first request in a minute that is refused finds a 429 that names the limit, and its body unread;
    another key of the same address goes on; refusals come back with time."""
    place.change(refusals=RefusalLimit(30, clock=lambda: place.clock[0]))
    for _ in range(30):
        assert place.ask(CHAT | {"temperature": 9}).status_code == 400
    refused = place.ask(None)
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "2")
    assert refused.json["error"]["message"].startswith(
        "refusals: more than 30 requests a minute of this key were refused"
    )
    other, _ = place.keys.create("other")
    assert place.ask(secret=other).status_code == 200
    place.clock[0] += 2.1
    assert place.ask().status_code == 200
    assert place.ask(CHAT | {"temperature": 9}).status_code == 400
    assert place.ask().status_code == 429


def test_strangers_are_limited_by_address(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses at keys are refused without a look into the store once an address has made too many; a key that has been
    good here goes on from that address, as behind a proxy, and other addresses do not notice."""
    place.change(refusals=RefusalLimit(30, clock=lambda: place.clock[0]))
    assert place.ask().status_code == 200
    for number in range(30):
        assert place.ask(secret=f"sk-{number}").status_code == 401
    with monkeypatch.context() as patch:
        patch.setattr(place.server.keys, "verify", None)
        refused = place.ask(None, secret="sk-new")
    assert (refused.status_code, refused.json["error"]["message"].partition(":")[0]) == (429, "refusals")
    assert place.ask().status_code == 200
    assert place.ask(secret="sk-new", REMOTE_ADDR="10.0.0.9").status_code == 401


def test_pages_of_other_sites_use_up_no_refusals(make: Callable[..., WorkerState]) -> None:
    """Requests from pages of other sites are refused without counting as refusals of the user."""
    client = create_app(make(refusals_per_minute=5)).test_client()
    for _ in range(20):
        assert (
            client.post("/v1/chat/completions", json=CHAT, headers={"Origin": "http://evil.example"}).status_code == 403
        )
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_without_keys_an_address_is_limited(make: Callable[..., WorkerState]) -> None:
    """On a server without keys refusals are counted by address; probes are never refused; 0 is no limit."""
    client = create_app(make(refusals_per_minute=5)).test_client()
    wrong = [client.post("/v1/chat/completions", json={}).status_code for _ in range(7)]
    assert wrong == [400] * 5 + [429] * 2
    assert client.get("/ping").status_code == 200
    client = create_app(make(refusals_per_minute=0)).test_client()
    assert {client.post("/v1/chat/completions", json={}).status_code for _ in range(50)} == {400}


def test_memory_budget_of_a_caller_and_of_all() -> None:
    """A caller's large bodies are refused beyond its share, all callers' beyond the whole; small ones never; what is
    given back has room again, and one body always."""
    budget = MemoryBudget(total=5 * SMALL_BYTES, by_caller=3 * SMALL_BYTES)
    with budget.allocate("a") as first, budget.allocate("a") as second, budget.allocate("b") as third:
        first.grow(2 * SMALL_BYTES)
        with pytest.raises(LimitExceeded, match="body: this caller"):
            second.check(2 * SMALL_BYTES)
        second.grow(SMALL_BYTES)  # small
        with pytest.raises(LimitExceeded):
            second.grow(SMALL_BYTES)
        third.grow(2 * SMALL_BYTES)
        with budget.allocate("c") as fourth, pytest.raises(Overloaded):
            fourth.grow(2 * SMALL_BYTES)
        assert budget.used == 4 * SMALL_BYTES
    assert (budget.used, budget.used_by) == (0, {})
    with budget.allocate("a") as alone:
        alone.check(50 * SMALL_BYTES)
        alone.grow(50 * SMALL_BYTES)


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_over_the_memory_budget(place: Place, chunked: bool) -> None:
    """While a key's bodies fill its share another of its large bodies is a 429 with Retry-After, unread where its
    length is announced; another key's is taken; afterwards nothing is held."""
    budget = MemoryBudget(total=2**21, by_caller=2**20)
    place.change(memory=budget)
    body = json.dumps(CHAT | {"messages": [{"role": "user", "content": " " * 2**18}]}).encode()
    other, _ = place.keys.create("other")
    with budget.allocate(place.key.key_id) as held:
        held.grow(2**20)
        if chunked:
            more = {"CONTENT_LENGTH": "", "HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}
            refused = place.ask(body, **more)
        else:
            refused = place.ask(None)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert refused.json["error"]["message"].startswith("body: this caller has 1048576 bytes")
        assert place.ask().status_code == 200
        assert "context length" in place.ask(body, secret=other).json["error"]["message"]
    assert budget.used == 0
    assert "context length" in place.ask(body).json["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_bodies_of_the_management_api_count_in_the_memory_budget(place: Place, method: str) -> None:
    """A large body is memory at every route that reads one, also where it is not needed."""
    budget = place.server.memory
    unread = {"wsgi.input": Unread(), "CONTENT_LENGTH": str(10 * 2**20)}
    secret, key = place.keys.create("ops", scopes=("manage",))
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    with budget.allocate(key.key_id) as held:
        held.grow(budget.by_caller - 2**16)
        path = "/api/2.0/serving-endpoints"
        refused = place.client.open(path, method=method, headers=headers, environ_overrides=unread)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert budget.used == 0


def test_a_large_reply_counts_in_the_memory_budget(place: Place) -> None:
    """A reply that is not streamed is held with what it repeats, until it is encoded; a streamed one is not."""
    body = {"model": "assistant", "prompt": "Hi", "max_tokens": 1, "suffix": "x" * 2**17}
    budget = place.server.memory
    with budget.allocate(place.key.key_id) as held:
        held.grow(budget.by_caller - 2**16)
        assert place.ask(body, path="/v1/completions").status_code == 429
    assert place.ask(body, path="/v1/completions").status_code == 200
    assert budget.used == 0
