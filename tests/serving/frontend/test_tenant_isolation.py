"""The information about other tenants' requests that a tenant with a valid key can find in its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.frontend.operation import Request
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.http.inference import info_routes
from mlflow_llm.serving.metering import Keys, Ledger, Limits, Store
from mlflow_llm.serving.metering.accounts.authorization import UNKNOWN
from mlflow_llm.serving.modes import PayPerToken
from mlflow_llm.serving.observability.access_record import AccessRecord

ASKED = {"model": "assistant", "prompt": "What I ask is mine.", "max_tokens": 7, "ignore_eos": True}
MINE = {"model": "assistant", "prompt": "x", "max_tokens": 1, "seed": 1, "temperature": 0}
CHANGES = ("created", "id", "Content-Length", "X-Request-Id", "x-ratelimit-reset-requests")


@pytest.fixture
def place(make: Callable[..., WorkerState], tmp_path: Path) -> Iterator[tuple[FlaskClient, dict[str, dict[str, str]]]]:
    """Return a client and the headers of each tenant's key, with limits on the endpoint and on each key."""
    store = Store(f"sqlite:///{tmp_path}/ledger.db")
    ledger, keys, limits = Ledger(store, state_dir=tmp_path), Keys(store), Limits(store)
    server = make(keys=keys, mode=PayPerToken(ledger), ledger=ledger)
    headers = {}
    for tenant in ("victim", "attacker"):
        secret, key = keys.create(tenant, scopes=("invoke", "usage"))
        headers[tenant] = {"Authorization": f"Bearer {secret}"}
        limits.set("key", key.key_id, "qpm", 1000)
    for kind in ("itpm", "otpm", "qpm", "qph", "in_flight"):
        limits.set("endpoint", "assistant", kind, 1_000_000)
    yield create_app(server).test_client(), headers
    ledger.close()
    store.close()


def seen(client: FlaskClient, headers: dict[str, str]) -> list[Any]:
    """Return all that a key's holder can see, without what changes with time and its own requests."""
    whole = client.post("/v1/completions", json=MINE, headers=headers)
    found: list[Any] = [
        {k: v for k, v in whole.json.items() if k not in CHANGES},
        {
            k: v
            for k, v in whole.headers.items()
            if k not in CHANGES and not k.startswith("x-ratelimit-remaining-requests")
        },
    ]
    for path in (
        "/v1/models",
        "/api/2.0/endpoints/",
        "/health",
        "/ready",
        "/metrics",
        "/api/2.0/serving-endpoints/assistant/metrics",
    ):
        answer = client.get(path, headers=headers)
        found.append((path, answer.status_code, answer.text))
    usage = client.get("/api/2.0/usage?by=tenant", headers=headers)
    found.append({row["tenant"] for row in usage.json["usage"]})
    refused = client.post("/v1/completions", json=MINE | {"max_tokens": 2_000_000}, headers=headers)
    found.append((refused.status_code, refused.text))
    return found


def test_metrics_take_the_scope_manage_or_the_probe_listener(make: Callable[..., WorkerState], tmp_path: Path) -> None:
    """Metrics are a 401 without a key and a 403 without the scope manage; with a probe listener only that has the
    route, and without keys it is open.
    """
    store = Store(f"sqlite:///{tmp_path}/ledger.db")
    keys = Keys(store)
    client = create_app(make(keys=keys)).test_client()
    seen = [client.get("/metrics").status_code]
    for scope in ("invoke", "usage", "manage"):
        secret, _ = keys.create("team", scopes=(scope,))
        seen.append(client.get("/metrics", headers={"Authorization": f"Bearer {secret}"}).status_code)
    assert seen == [401, 403, 403, 200]
    record = AccessRecord(request_id="a", method="GET", path="/metrics")
    stranger = Request(operation=info_routes.ROUTES[-1], record=record, headers={}, caller=UNKNOWN)
    assert info_routes.metrics_exposition(make(keys=keys, probe_port=1), stranger).status == 200
    assert create_app(make()).test_client().get("/metrics").status_code == 200
    store.close()


def test_no_answer_changes_with_another_tenants_requests(place: tuple[FlaskClient, dict[str, dict[str, str]]]) -> None:
    """Answers, headers, lists, health, usage and refusals are to the byte the same before and after another tenant's
    requests, streamed, failed and running ones."""
    client, headers = place
    seen(client, headers["attacker"])
    before = seen(client, headers["attacker"])
    for body in (ASKED, ASKED | {"n": 1, "stream": False}, ASKED | {"temperature": 9}):
        client.post("/v1/completions", json=body, headers=headers["victim"])
    running = client.post(
        "/v1/completions", json=ASKED | {"stream": True, "max_tokens": 500}, headers=headers["victim"]
    )
    next(running.response)
    assert seen(client, headers["attacker"]) == before
    running.close()
    assert seen(client, headers["attacker"]) == before
