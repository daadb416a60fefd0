"""Shadow traffic over the routes: copies of requests, their rows and texts, and that no caller ever waits for one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
from flask.testing import FlaskClient
from gevent.event import Event

from mlflow_llm.serving.endpoints.config_body import config_body
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.frontend.background.payload_queue import PayloadQueue
from mlflow_llm.serving.frontend.background.shadow_queue import is_drawn
from mlflow_llm.serving.frontend.shadow_runner import ShadowRunner
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.payload_log import PayloadLog
from mlflow_llm.serving.interface.request import ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.interface.shadow import Shadow
from mlflow_llm.serving.metering import Keys, Ledger, Limits, Prices, Store
from mlflow_llm.serving.metering.accounts.limits import check_integrity
from mlflow_llm.serving.metering.accounts.money import Price
from mlflow_llm.serving.metering.usage.filter import UsageFilter
from mlflow_llm.serving.metering.usage.payloads import Payload, Payloads
from mlflow_llm.serving.metering.usage.usage import Usage
from mlflow_llm.serving.model_files.model_version import ModelVersion
from mlflow_llm.serving.modes import PayPerToken, Shadowing
from mlflow_llm.serving.observability import metrics
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoints
from mlflow_llm.serving.testing.instant_engine import InstantEngine

PATIENCE = 60
CHAT = {"model": "assistant", "max_tokens": 4, "seed": 1, "messages": [{"role": "user", "content": "Write to ada"}]}


class HeldStream:
    """A stream of an engine that has stopped: its first event comes when the gate opens."""

    def __init__(self, stream: Any, gate: Event) -> None:
        self._stream, self._gate = stream, gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> HeldStream:
        return self

    def __next__(self) -> Any:
        self._gate.wait()
        return next(self._stream)


class HeldEngine(InstantEngine):
    """An engine that makes no step until its gate opens, and notes what it gets."""

    def __init__(self, bundle: Bundle, max_model_len: int = 4096) -> None:
        super().__init__(bundle, EngineSettings(max_model_len=max_model_len))
        self.gate = Event()
        self.submitted: list[ValidRequest] = []

    def submit(self, request: ValidRequest) -> Any:
        self.submitted.append(request)
        return HeldStream(super().submit(request), self.gate)


class Place:
    """A server over a real store whose endpoint has a shadow, and a client of it."""

    def __init__(self, make: Callable[..., WorkerState], bundle: Bundle, root: Path) -> None:
        self._make, self._bundle = make, bundle
        self.store = Store(f"sqlite:///{root}/db")
        self.ledger = Ledger(self.store, state_dir=root)
        self.keys = Keys(self.store)
        self.secret = self.keys.create("acme")[0]
        self.payloads = Payloads(self.store)
        self.queue = PayloadQueue(self.payloads, self.ledger.now_ms)
        EndpointStore(self.store, locate=lambda entities: ()).declare("assistant", _config(bundle))
        self.engine = HeldEngine(bundle)
        self.runner: ShadowRunner | None = None

    def client(self, shadow: Shadow, log: PayloadLog | None = None, *, max_model_len: int = 4096) -> FlaskClient:
        self.engine = HeldEngine(self._bundle, max_model_len)
        server = self._make(
            mode=PayPerToken(self.ledger), keys=self.keys, ledger=self.ledger, payloads=self.queue, timeout=3600.0
        )
        (entity,) = server.endpoints
        entity = dataclasses.replace(entity, payload_log=log, identity=ModelVersion(name="a", version="1"))
        copied = dataclasses.replace(
            entity,
            entity="candidate",
            engine=self.engine,
            view=dataclasses.replace(entity.view, info=self.engine.info),
            mode=Shadowing(self.ledger),
            shadow=shadow,
            identity=ModelVersion(name="a", version="2"),
        )
        server = dataclasses.replace(server, endpoints=ServedEndpoints(dataclasses.replace(entity, shadows=(copied,))))
        self.runner = ShadowRunner(server, server.shadows)
        self.runner.start()
        return create_app(server).test_client()

    def ask(self, client: FlaskClient, **changes: Any) -> Any:
        head = {"Authorization": f"Bearer {self.secret}"}
        answer = client.post("/v1/chat/completions", json=CHAT | changes, headers=head)
        answer.get_data()  # a stream is over when it was read
        return answer

    def rows(self) -> list[Any]:
        return list(Usage(self.store).rows(UsageFilter()))

    def texts(self) -> list[Payload]:
        """Write what is queued, and return all rows, the oldest first."""
        self.queue.flush()
        return list(self.payloads.rows("assistant", self.ledger.now_ms()))[::-1]

    def until(self, true: Callable[[], bool]) -> None:
        with gevent.Timeout(PATIENCE):
            while not true():
                gevent.sleep(0.001)

    def settled(self) -> bool:
        assert self.runner is not None
        return not self.runner.num_running and all(row.status != "open" for row in self.rows())


def _config(bundle: Bundle) -> Any:
    from mlflow_llm.serving.control.model_sources import config_of
    from mlflow_llm.serving.control.spec import EndpointSpec

    return config_of(EndpointSpec(name="assistant", entity="/m", bundle=bundle))


@pytest.fixture
def place(make: Callable[..., WorkerState], instant_bundle: Bundle, tmp_path: Path) -> Iterator[Place]:
    found = Place(make, instant_bundle, tmp_path)
    yield found
    if found.runner is not None:
        found.runner.stop(PATIENCE)
    found.ledger.close()
    found.store.close()


def dropped() -> float:
    labels = {"endpoint": "assistant", "entity": "candidate"}
    return metrics.OWN.get_sample_value("mlflow_llm_shadows_dropped_total", labels) or 0.0


def test_a_stopped_shadow_delays_nobody(place: Place) -> None:
    """While the shadow's engine makes no step, requests are answered as always, whole and streamed; copies beyond the
    queue's bound are dropped and counted; when it goes on, the others run."""
    client = place.client(Shadow(max_queued=2, max_concurrent=1))
    before = dropped()
    for number in range(6):
        answer = place.ask(client, stream=number % 2 == 1)
        assert answer.status_code == 200
        gevent.sleep(0)
    place.until(lambda: len(place.engine.submitted) == 1)
    assert dropped() - before == 3
    assert [row.status for row in place.rows() if row.mode != "shadow"] == ["ok"] * 6
    place.engine.gate.set()
    place.until(lambda: len(place.engine.submitted) == 3 and place.settled())
    assert [row.status for row in place.rows() if row.mode == "shadow"] == ["ok"] * 3


def test_a_copy_is_counted_but_not_billed(place: Place) -> None:
    """The row of a copy has its tokens, the entity and version, no price, and neither key nor tenant of the caller; no
    limit is used up by it, also not when windows are built again. The engine gets it as a background request."""
    Prices(place.store).set("*", Price(input=10**9, cached=10**9, output=10**9))
    limits = Limits(place.store)
    for scope, subject in (("endpoint", "assistant"), ("tenant", "acme"), ("tenant", "shadow")):
        limits.set(scope, subject, "qpm", 2)
    client = place.client(Shadow())
    place.engine.gate.set()
    reply = place.ask(client, user="u1").json
    place.until(lambda: len(place.rows()) == 2 and place.settled())
    paid, copy = sorted(place.rows(), key=lambda row: row.mode == "shadow")
    assert (copy.mode, copy.key_id, copy.tenant, copy.entity) == ("shadow", "shadow", "shadow", "candidate")
    assert (copy.model_version, copy.cost, copy.status) == ("a/2", 0, "ok")
    assert (copy.prompt_tokens, copy.completion_tokens) == (paid.prompt_tokens, 4)
    assert paid.cost > 0
    assert copy.tags["shadow_of"] == paid.request_id == reply["id"].removeprefix("chatcmpl-")
    check_integrity(place.store)
    limits.set("key", "shadow", "qpm", 1)  # a window that is built from the ledger now
    assert [place.ask(client).status_code for _ in range(2)] == [200, 429]
    place.until(lambda: len(place.rows()) == 4 and place.settled())
    check_integrity(place.store)
    assert all(one.background for one in place.engine.submitted)


def test_pairs_in_the_payload_log(place: Place) -> None:
    """The log has both answers under the request's id, each with its version; the copy's row repeats no request, and
    redaction applies to its answer."""
    client = place.client(Shadow(), PayloadLog(redact=("(?s).",)))
    place.engine.gate.set()
    asked = place.ask(client, stream=True)
    assert asked.status_code == 200
    place.until(lambda: len(place.rows()) == 2 and place.settled())
    answer, copy = sorted(place.texts(), key=lambda row: row.shadow)
    assert answer.request_id == copy.request_id
    assert [(row.entity, row.model_version, row.shadow) for row in (answer, copy)] == [
        ("model-1", "a/1", False),
        ("candidate", "a/2", True),
    ]
    assert (copy.request, copy.codes, copy.status_code) == (None, (), 200)
    (choice,) = json.loads(copy.response or "")["choices"]
    assert set(choice["message"]["content"].split("[redacted]")) == {""}


def test_no_text_is_kept_unasked(place: Place) -> None:
    """Without a payload log a copy leaves no text; with one, only where the request itself is in its sample."""
    client = place.client(Shadow())
    place.engine.gate.set()
    place.ask(client)
    place.until(lambda: len(place.rows()) == 2 and place.settled())
    assert place.texts() == []


def test_the_health_of_a_shadow(place: Place) -> None:
    """Keys that manage see a shadow's engine, which counts towards nothing; other callers do not see it."""
    client = place.client(Shadow())
    secrets = {"invoke": place.secret, "manage": place.keys.create("ops", scopes=("manage",))[0]}

    def health(scope: str) -> Any:
        return client.get("/health", headers={"Authorization": f"Bearer {secrets[scope]}"}).json["endpoints"][
            "assistant"
        ]

    found = {scope: health(scope) for scope in secrets}
    assert set(found["manage"]["shadows"]) == {"candidate"}
    assert found["manage"]["shadows"]["candidate"]["status"] == "ready"
    assert "entities" not in found["manage"]
    assert "shadows" not in found["invoke"]
    assert found["manage"]["status"] == "ready"


def test_a_shadow_that_refuses(place: Place) -> None:
    """A request that only the shadow refuses is answered, and the log has the refusal of the copy."""
    client = place.client(Shadow(), PayloadLog(), max_model_len=8)
    assert place.ask(client).status_code == 200
    place.until(lambda: len(place.texts()) == 2)
    assert [(row.shadow, row.status_code, row.response is None) for row in place.texts()] == [
        (False, 200, False),
        (True, 400, True),
    ]
    assert [row.mode for row in place.rows()] == ["pay_per_token"]


def test_refused_requests_are_not_copied(place: Place) -> None:
    """A request that is not admitted has no copy, and no request can name the shadow."""
    client = place.client(Shadow())
    Limits(place.store).set("tenant", "acme", "qpm", 0)
    assert place.ask(client, temperature=-1).status_code == 400
    assert place.ask(client).status_code == 403
    assert place.ask(client, model="candidate").status_code == 404
    gevent.sleep(0)
    assert place.engine.submitted == []


def test_the_end_of_a_worker(place: Place) -> None:
    """A worker that ends drops the copies that wait and ends those that run: their rows are closed, and counted."""
    client = place.client(Shadow(max_concurrent=1))
    before = dropped()
    for _ in range(3):
        place.ask(client)
        gevent.sleep(0)
    place.until(lambda: len(place.engine.submitted) == 1)
    assert place.runner is not None
    place.runner.stop(PATIENCE)
    assert dropped() - before == 3
    assert {row.status for row in place.rows() if row.mode == "shadow"} == {"aborted"}
    assert place.ask(client).status_code == 200
    assert dropped() - before == 4


def test_the_sample_is_deterministic(place: Place) -> None:
    """Whether a request is copied follows from its id: the same everywhere, and for the given share of all."""
    place.client(Shadow(sample=0.25))
    entity = dataclasses.replace(_shadow(place), shadow=Shadow(sample=0.25))
    drawn = [is_drawn(entity, f"request-{number}") for number in range(4000)]
    assert drawn == [is_drawn(entity, f"request-{number}") for number in range(4000)]
    assert 900 < sum(drawn) < 1100
    assert all(is_drawn(dataclasses.replace(entity, shadow=Shadow()), f"request-{number}") for number in range(100))


def _shadow(place: Place) -> Any:
    from mlflow_llm.serving.routing.served_endpoints import ServedEntity

    return ServedEntity(endpoint="assistant", entity="candidate", view=None, engine=place.engine)  # type: ignore[arg-type]


ENTITIES = [
    {"name": "v1", "entity_name": "/m"},
    {"name": "v2", "entity_name": "/n", "shadow": {"sample": 0.1}},
]


def test_the_config_of_a_shadow() -> None:
    """The only entity without shadow gets all traffic, and a config that is shown can be sent again."""
    config = config_body({"served_entities": ENTITIES}, "config")
    assert [(route.served_model_name, route.traffic_percentage) for route in config.routes] == [("v1", 100)]
    assert config.served_entities[1].shadow == Shadow(sample=0.1)


@pytest.mark.parametrize(
    ("change", "routes", "field"),
    [
        ({"shadow": {"sample": 0}}, None, r"served_entities\[1\].shadow.sample"),
        ({"shadow": {"sample": 2}}, None, r"served_entities\[1\].shadow.sample"),
        ({"shadow": {"max_queued": 0}}, None, r"served_entities\[1\].shadow.max_queued"),
        ({"shadow": {"share": 1}}, None, r"served_entities\[1\].shadow.share"),
        ({"shadow": True}, None, r"served_entities\[1\].shadow"),
        ({"min_provisioned_throughput": 5}, None, r"served_entities\[1\].max_provisioned_throughput"),
        (
            {"entity_name": "a", "entity_version": "champion", "follow_alias": True, "canary": {}},
            None,
            r"served_entities\[1\].canary.*a shadow",
        ),
        ({}, {"v1": 90, "v2": 10}, r"traffic_config.routes\[1\].traffic_percentage: 10 .* v2 is a shadow"),
    ],
)
def test_configs_that_are_refused(change: dict[str, Any], routes: dict[str, int] | None, field: str) -> None:
    """A shadow without a sample, with traffic or with a reserve is refused by the field's name."""
    body: dict[str, Any] = {"served_entities": [ENTITIES[0], ENTITIES[1] | change]}
    if routes is not None:
        listed = [{"served_model_name": name, "traffic_percentage": share} for name, share in routes.items()]
        body["traffic_config"] = {"routes": listed}
    with pytest.raises(InvalidField, match=field):
        config_body(body, "config")


def test_somebody_has_to_answer() -> None:
    """An endpoint of shadows alone is refused."""
    with pytest.raises(InvalidField, match=r"served_entities: 1 .* without shadow"):
        config_body({"served_entities": ENTITIES[1:]}, "config")
