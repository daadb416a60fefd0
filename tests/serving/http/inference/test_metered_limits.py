"""Limits as callers meet them: over the routes, with a real ledger whose clock is the test's."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import msgspec
import openai
import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.metering import Keys, Ledger, Limits, Price, Store
from mlflow_llm.serving.metering.accounts.limits import Bound, check_integrity, plain
from mlflow_llm.serving.metering.accounts.money import units
from mlflow_llm.serving.modes import PayPerToken
from mlflow_llm.serving.observability.metrics import OWN
from mlflow_llm.serving.routing.admission import profiles_of
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoint

BODY = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True}
PROMPT = 14 + len("Hi")  # template and text, a byte a token
NOW = 1_800_000_000


class Place:
    """A server with its limits and its clock."""

    def __init__(self, server: WorkerState, store: Store, keys: Keys, clock: list[float]) -> None:
        self.server, self.store, self.keys, self.clock = server, store, keys, clock
        self.client: FlaskClient = create_app(server).test_client()
        self.limits = Limits(store)
        self.secret, self.key = keys.create("acme")

    def ask(self, secret: str | None = None, **body: Any) -> Any:
        headers = {"Authorization": f"Bearer {secret or self.secret}"}
        return self.client.post("/v1/chat/completions", json=BODY | body, headers=headers)

    def subject(self, scope: str) -> str:
        return {"key": self.key.key_id, "tenant": "acme", "endpoint": "assistant", "user": "assistant"}[scope]


@pytest.fixture(scope="session")
def new_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty store to copy, which is faster than making one."""
    path = tmp_path_factory.mktemp("new") / "ledger.db"
    store = Store(f"sqlite:///{path}")
    store.close()
    return path


@pytest.fixture
def place(make: Callable[..., WorkerState], new_store: Path, tmp_path: Path) -> Iterator[Place]:
    shutil.copy(new_store, tmp_path / "ledger.db")
    store = Store(f"sqlite:///{tmp_path}/ledger.db")
    clock = [float(NOW)]
    ledger = Ledger(store, state_dir=tmp_path, clock=lambda: clock[0], monotonic=lambda: clock[0])
    keys = Keys(store)
    server = make(keys=keys, mode=PayPerToken(ledger))
    ledger.prices.set("*", Price(input=1_000_000, output=10_000_000), effective=NOW)
    yield Place(server, store, keys, clock)
    check_integrity(store)
    ledger.close()
    store.close()


def used(answer: Any) -> tuple[int, int]:
    usage = answer.json["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def test_fields_that_the_mode_does_not_take(place: Place) -> None:
    """Fields that the mode does not take are refused with the message of ``prepare``."""
    answer = place.ask(n=2)
    allowed = "1: more choices are available on provisioned throughput endpoints only"
    assert (answer.status_code, answer.json["error"]["message"]) == (400, f"n: 2 is not allowed; expected {allowed}")


@pytest.mark.parametrize("scope", ["key", "tenant", "endpoint", "user"])
def test_a_soft_limit_refuses_nothing(place: Place, scope: str) -> None:
    """Requests beyond it are admitted, named in a header (but for one that others use too) and counted."""
    labels, name = {"endpoint": "assistant", "scope": scope, "kind": "qpm"}, "mlflow_llm_soft_limit_exceeded_total"
    before = OWN.get_sample_value(name, labels) or 0.0
    place.limits.set(scope, place.subject(scope), "qpm", Bound(value=1, soft=True))
    first, second = place.ask(), place.ask()
    assert (first.status_code, second.status_code) == (200, 200)
    assert "x-ratelimit-soft-exceeded" not in first.headers
    assert second.headers.get("x-ratelimit-soft-exceeded") == (None if scope == "endpoint" else f"{scope} qpm")
    assert "x-ratelimit-limit-requests" not in second.headers  # clients would wait
    assert OWN.get_sample_value(name, labels) == before + 1
    place.limits.set(scope, place.subject(scope), "qpm", 1)
    assert place.ask().status_code == 429


@pytest.mark.parametrize("scope", ["key", "tenant", "endpoint", "user"])
@pytest.mark.parametrize("kind", ["itpm", "otpm", "qpm", "qph", "budget_day", "budget_month"])
def test_retry_after_says_when_a_limit_admits_again(place: Place, kind: str, scope: str) -> None:
    """For each limit in each scope the refusal names it, what is left (of one's own limits only) and a Retry-After that
    is exact to the second.
    """
    first = place.ask()
    assert first.status_code == 200
    prompt, completion = used(first)
    one = {"itpm": prompt, "otpm": completion, "qpm": 1, "qph": 1}.get(kind, prompt + 10 * completion)
    place.limits.set(scope, place.subject(scope), kind, 2 * one + one // 2)
    place.clock[0] += 3.25
    assert place.ask().status_code == 200
    refused = place.ask()
    assert refused.status_code == 429
    message = refused.json["error"]["message"]
    limit, left, asked = (plain(kind, value) for value in (2 * one + one // 2, one // 2, one))
    wait = int(message.rpartition("try again in ")[2].removesuffix(" s"))
    exhausted = wait > 61  # a minute window frees a slot of a second late, for which a client comes back once more
    assert refused.headers["Retry-After"] == str(wait if exhausted else min(60, wait))
    assert refused.headers.get("x-should-retry") == ("false" if exhausted else None)
    error = refused.json["error"]
    spent = "insufficient_quota" if kind.startswith("budget") else None
    assert (error["type"], error["code"]) == (spent or "rate_limit_error", spent or "rate_limit_exceeded")
    assert message.startswith(f"{kind}: the {scope}'s limit is {limit} ")
    reported = "" if scope == "endpoint" else f"{left} are left and "
    assert f"; {reported}this request needs {asked}; try again in {wait} s" in message
    noun = {"itpm": "input-tokens", "otpm": "output-tokens", "qpm": "requests", "qph": "requests"}.get(kind, "budget")
    if scope == "endpoint":
        assert not [name for name in dict(refused.headers) if name.startswith("x-ratelimit")]
    else:
        assert refused.headers[f"x-ratelimit-limit-{noun}"] == str(limit)
        assert refused.headers[f"x-ratelimit-remaining-{noun}"] == str(left)
        assert refused.headers[f"x-ratelimit-reset-{noun}"] == f"{wait}s"
    place.clock[0] += wait - 1
    assert place.ask().status_code == 429
    place.clock[0] += 1
    assert place.ask().status_code == 200


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
# route, body, and the status of a spent budget
ROUTES: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/chat/completions", CHAT | {"model": "assistant"}, 429),
    ("/v1/completions", {"model": "assistant", "prompt": "Hi", "max_tokens": 4}, 429),
    ("/v1/responses", {"model": "assistant", "input": "Hi", "max_output_tokens": 4}, 429),
    ("/v1/messages", CHAT | {"model": "assistant"}, 429),
    ("/v3/chat/completions", CHAT | {"model": "assistant"}, 429),
    ("/mindie/v1/chat/completions", CHAT | {"model": "assistant"}, 429),
    ("/v2/models/assistant/generate", {"text_input": "Hi", "parameters": {"max_new_tokens": 4}}, 429),
    ("/v2/models/assistant/generate", {"text_input": "Hi", "max_tokens": 4, "temperature": 1.0}, 429),
    ("/serving-endpoints/assistant/invocations", CHAT, 403),
    ("/serving-endpoints/chat/completions", CHAT | {"model": "assistant"}, 403),
    ("/endpoints/assistant/invocations", CHAT, 403),
    ("/invocations", CHAT, 403),
]


@pytest.mark.parametrize(("path", "body", "status"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_nobody_waits_for_a_spent_budget(
    place: Place, path: str, body: dict[str, Any], status: int, stream: bool
) -> None:
    """Each dialect's clients raise at once: by ``x-should-retry`` and a wait that they do not take, or, where they
    repeat every 429, by a 403."""
    place.limits.set("tenant", "acme", "budget_month", 100)
    assert place.ask().status_code == 200
    streamed = {"stream": True} if stream and not path.startswith("/v2") else {}
    path += "_stream" if stream and path.startswith("/v2") else ""
    refused = place.client.post(path, json=body | streamed, headers={"Authorization": f"Bearer {place.secret}"})
    assert refused.status_code == status, refused.text
    assert "budget_month: the tenant's limit is" in refused.text
    wait = refused.text.rpartition("try again in ")[2].partition(" s")[0]
    if status == 403:
        assert (refused.json["error_code"], "Retry-After" in refused.headers) == ("PERMISSION_DENIED", False)
    else:
        assert (refused.headers["Retry-After"], refused.headers["x-should-retry"]) == (wait, "false")
        assert int(wait) > 60
    assert refused.headers["x-ratelimit-reset-budget"] == f"{wait}s"


@pytest.mark.parametrize("path", ["/serving-endpoints/assistant/invocations", "/invocations"])
def test_an_hour_s_window_passes(place: Place, path: str) -> None:
    """Databricks' own limit of queries an hour stays a 429 there, with the true wait."""
    place.limits.set("tenant", "acme", "qph", 1)
    assert place.ask().status_code == 200
    refused = place.client.post(path, json=CHAT, headers={"Authorization": f"Bearer {place.secret}"})
    assert (refused.status_code, refused.json["error_code"]) == (429, "REQUEST_LIMIT_EXCEEDED")
    wait = int(refused.headers["Retry-After"])
    place.clock[0] += wait - 1
    assert place.ask().status_code == 429
    place.clock[0] += 1
    assert place.ask().status_code == 200


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_clients_raise_at_once(place: Place, name: str) -> None:
    """The unmodified clients, with the retries that they have by default, ask once."""
    place.limits.set("tenant", "acme", "budget_month", 100)
    assert place.ask().status_code == 200
    asked: list[str] = []
    note: Any = {"request": [lambda request: asked.append(request.url.path)]}
    library: Any = {"openai": openai, "anthropic": anthropic}[name]
    http: Any = {"openai": httpx, "anthropic": httpx2}[name]
    with http.Client(transport=http.WSGITransport(app=place.client.application), event_hooks=note) as connection:
        if name == "openai":
            gpt = openai.OpenAI(api_key=place.secret, base_url="http://localhost/v1", http_client=connection)
            ask: Any = gpt.chat.completions.create
        else:
            claude = anthropic.Anthropic(api_key=place.secret, base_url="http://localhost", http_client=connection)
            ask = claude.messages.create
        with pytest.raises(library.RateLimitError, match="budget_month"):
            ask(**CHAT, model="assistant")
    assert len(asked) == 1


def test_the_strictest_limit_wins(place: Place) -> None:
    """Limits of key, tenant and endpoint all apply, and the error names the one that blocks longest."""
    place.limits.set("key", place.key.key_id, "otpm", 1000)
    place.limits.set("tenant", "acme", "otpm", 10)
    place.limits.set("endpoint", "assistant", "qph", 3)
    reported = [place.ask() for _ in range(3)]
    assert [answer.status_code for answer in reported] == [200, 200, 429]
    assert reported[0].headers["x-ratelimit-remaining-output-tokens"] == "6"
    assert reported[0].headers["x-ratelimit-limit-tokens"] == "10"
    assert "x-ratelimit-remaining-requests" not in reported[0].headers  # it would reveal others' requests
    assert reported[2].json["error"]["message"].startswith("otpm: the tenant's")
    assert place.ask(max_tokens=1).status_code == 200
    assert place.ask(max_tokens=3).json["error"]["message"].startswith("qph: the endpoint's")
    other, _ = place.keys.create("zeta")
    assert place.ask(other).json["error"]["message"].startswith("qph: the endpoint's")


def test_a_default_of_max_tokens_is_reserved(place: Place) -> None:
    """Without ``max_tokens`` the server's default is reserved, and is what the request gets."""
    place.limits.set("tenant", "acme", "otpm", 100)
    assert place.ask(max_tokens=None).json["error"]["message"].endswith("more than the limit ever allows")
    endpoint = next(iter(place.server.endpoints))
    view = dataclasses.replace(endpoint.view, profile=profiles_of(ServerSettings(default_max_tokens=40))["open"])
    changed = dataclasses.replace(endpoint, view=view)
    place.server.endpoints.replace((ServedEndpoint(name="assistant", entities={"model-1": changed}),))
    assert used(place.ask(max_tokens=None))[1] == 40
    assert used(place.ask(max_tokens=None))[1] == 40
    assert place.ask(max_tokens=None).status_code == 429
    assert used(place.ask(max_tokens=20))[1] == 20


def test_unused_reservations_come_back(place: Place) -> None:
    """``max_tokens`` is reserved at admission; at the end a request has taken what it generated."""
    early = {"max_tokens": 90, "stop": ["a", "b", "c", "d"], "temperature": 1.0}
    seed = next(seed for seed in range(100) if used(place.ask(**early, seed=seed))[1] < 90)
    place.clock[0] += 100
    place.limits.set("tenant", "acme", "otpm", 100)
    taken = used(place.ask(**early, seed=seed))[1]
    never = place.ask(max_tokens=101)
    assert never.status_code == 400
    assert never.json["error"]["message"].endswith("more than the limit ever allows")
    assert "Retry-After" not in never.headers
    assert place.ask(max_tokens=100 - taken + 1).status_code == 429
    assert place.ask(max_tokens=100 - taken).status_code == 200


def test_requests_in_flight(place: Place) -> None:
    """An unfinished stream holds its place in flight until it is closed."""
    place.limits.set("key", place.key.key_id, "in_flight", 1)
    stream = place.ask(stream=True, max_tokens=300)
    lines = iter(stream.response)
    next(lines)
    refused = place.ask()
    assert refused.status_code == 429
    assert refused.json["error"]["message"].startswith("in_flight: the key's limit is 1 requests in flight; 0 are left")
    assert refused.headers["Retry-After"] == "1"
    assert refused.headers["x-ratelimit-remaining-concurrent-requests"] == "0"
    stream.close()
    assert place.ask().status_code == 200


def test_a_limit_of_zero(place: Place) -> None:
    """A limit of zero refuses without a Retry-After, since waiting does not help."""
    place.limits.set("tenant", "acme", "qpm", 0)
    refused = place.ask()
    assert (refused.status_code, "Retry-After" in refused.headers) == (403, False)
    assert refused.json["error"]["message"].startswith("qpm: the tenant's limit is 0")


def test_a_budget_that_is_spent(place: Place) -> None:
    """A spent total budget refuses further requests without a Retry-After."""
    place.limits.set("tenant", "acme", "budget", 150)
    spent = 0
    for _ in itertools.count():
        answer = place.ask(max_tokens=2)
        if answer.status_code == 403:
            break
        prompt, completion = used(answer)
        spent += prompt + 10 * completion
    assert 100 < spent <= 150
    assert "Retry-After" not in answer.headers
    assert f"; {units(150 - spent)} are left" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "said"),
    [("/serving-endpoints/assistant/invocations", "error_code"), ("/endpoints/assistant/invocations", "error_code")],
)
def test_limits_in_other_dialects(place: Place, path: str, said: str) -> None:
    """Databricks' and MLflow's routes refuse in their own forms with the same headers."""
    place.limits.set("user", "assistant", "qpm", 1)
    assert place.ask().status_code == 200
    headers = {"Authorization": f"Bearer {place.secret}"}
    body = {name: value for name, value in BODY.items() if name not in ("model", "ignore_eos")}
    refused = place.client.post(path, json=body, headers=headers)
    assert refused.status_code == 429
    assert refused.json[said] == "REQUEST_LIMIT_EXCEEDED"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


def test_an_engine_knows_tenants_by_hashes_and_weights(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gets the key's weight and a hash of the tenant, the same for all keys of one tenant."""
    (entity,) = place.server.endpoints
    submitted: list[Any] = []
    submit = type(entity.engine).submit
    monkeypatch.setattr(
        type(entity.engine), "submit", lambda engine, request: submitted.append(request) or submit(engine, request)
    )
    heavy, _ = place.keys.create("acme", weight=7)
    other, _ = place.keys.create("other")
    for secret in (place.secret, heavy, other):
        assert place.ask(secret).status_code == 200
    own, same, foreign = submitted
    assert own.tenant == same.tenant != foreign.tenant
    assert [one.weight for one in submitted] == [1, 7, 1]
    assert not any(name in msgspec.msgpack.encode(submitted).decode("latin-1") for name in ("acme", "other"))
