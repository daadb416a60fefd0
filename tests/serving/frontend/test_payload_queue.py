"""The payload log over the routes: what is kept of requests, and what happens when the store is behind."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
from flask.testing import FlaskClient
from gevent.event import Event

from mlflow_llm.serving.endpoints.config import EndpointConfig
from mlflow_llm.serving.endpoints.store import EndpointStore
from mlflow_llm.serving.frontend.background import payload_queue
from mlflow_llm.serving.frontend.background.payload_queue import PayloadQueue
from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import Unavailable
from mlflow_llm.serving.interface.payload_log import MAX_TEXT, PayloadLog
from mlflow_llm.serving.interface.reply import Choice, ReplyCall
from mlflow_llm.serving.metering import Keys, Ledger, Limits, Store
from mlflow_llm.serving.metering.usage.payloads import Payload, Payloads
from mlflow_llm.serving.modes.pay_per_token import PayPerToken
from mlflow_llm.serving.observability import metrics
from mlflow_llm.serving.observability.payload_capture import Captured
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoints

PATIENCE = 60
API, REQUESTS = "/api/2.0/serving-endpoints/assistant/payloads", "/api/2.0/requests"
CHAT = {"model": "assistant", "max_tokens": 4, "messages": [{"role": "user", "content": "Write to ada@example.org"}]}


class Place:
    """A server over a real store, and clients of it with the payload log as each test wants it."""

    def __init__(self, make: Callable[..., WorkerState], bundle: Bundle, root: Path) -> None:
        self._make = make
        self.store = Store(f"sqlite:///{root}/db")
        self.ledger, keys = Ledger(self.store, state_dir=root), Keys(self.store)
        self.payloads = Payloads(self.store)
        self.queue = PayloadQueue(self.payloads, self.ledger.now_ms)
        self.keys = keys
        self.secrets = {
            "worker": keys.create("acme")[0],
            "operator": keys.create("ops", scopes=("manage",))[0],
        }
        self.endpoints = EndpointStore(self.store, locate=lambda entities: ())
        self.endpoints.declare("assistant", _config(bundle))

    def client(self, settings: PayloadLog | None) -> FlaskClient:
        server = self._make(
            mode=PayPerToken(self.ledger),
            keys=self.keys,
            ledger=self.ledger,
            payloads=self.queue,
            endpoint_store=self.endpoints,
        )
        (entity,) = server.endpoints
        served = ServedEndpoints(dataclasses.replace(entity, payload_log=settings))
        return create_app(dataclasses.replace(server, endpoints=served)).test_client()

    def head(self, who: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secrets[who]}"}

    def logged(self) -> list[Payload]:
        """Write what is queued, and return all rows, the newest first."""
        self.queue.flush()
        return list(self.payloads.rows("assistant", self.ledger.now_ms()))


def _config(bundle: Bundle) -> EndpointConfig:
    from mlflow_llm.serving.control.model_sources import config_of
    from mlflow_llm.serving.control.spec import EndpointSpec

    return config_of(EndpointSpec(name="assistant", entity="/m", bundle=bundle))


@pytest.fixture
def place(make: Callable[..., WorkerState], instant_bundle: Bundle, tmp_path: Path) -> Iterator[Place]:
    found = Place(make, instant_bundle, tmp_path)
    yield found
    found.ledger.close()
    found.store.close()


def ask(place: Place, client: FlaskClient, body: object = CHAT, **headers: str) -> Any:
    path = "/v1/chat/completions"
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(path, data=data, headers=place.head("worker") | headers, content_type="application/json")
    answer.get_data()  # a stream is over when it was read
    return answer


def _id(reply: dict[str, Any]) -> str:
    """Return the id of a reply as the ledger has it."""
    return str(reply["id"]).removeprefix("chatcmpl-")


def test_nothing_is_logged_by_default(place: Place) -> None:
    """Without the setting, nothing of a request is kept or queued."""
    client = place.client(None)
    assert ask(place, client).status_code == 200
    assert place.logged() == []


def test_a_request_and_its_reply_are_logged(place: Place) -> None:
    """The row has the body as it was received, the reply's text, whose it is and how it ended; streamed or not."""
    client = place.client(PayloadLog())
    whole = ask(place, client, CHAT | {"user": "u1"}).json
    ask(place, client, CHAT | {"stream": True, "seed": 3})
    streamed, first = place.logged()
    (choice,) = json.loads(first.response or "")["choices"]
    assert (choice["message"], choice["finish_reason"]) == (whole["choices"][0]["message"], "length")
    assert json.loads(first.request or "") == CHAT | {"user": "u1"}
    assert (first.request_id, first.tenant, first.status_code, first.sample) == (_id(whole), "acme", 200, 1.0)
    assert (first.endpoint, first.entity, first.codes) == ("assistant", "model-1", ())
    assert json.loads(streamed.request or "")["stream"] is True
    assert len(json.loads(streamed.response or "")["choices"][0]["message"]["content"]) > 0


def test_texts_are_redacted_before_they_are_stored(place: Place) -> None:
    """A pattern is replaced however JSON writes the text, in the request and in the reply."""
    client = place.client(PayloadLog(redact=(r"[\w.]+@[\w.]+", "[A-Za-z]{3,}")))
    escaped = json.dumps(CHAT).replace("@", "\\u0040").encode()
    ask(place, client, escaped)
    (row,) = place.logged()
    assert not {"example", "ada", "Write"} & set(re.findall(r"\w+", str(row.request)))
    assert "[redacted]" in str(row.request)
    (choice,) = json.loads(row.response or "")["choices"]  # the names of its own fields stay
    assert re.findall("[A-Za-z]{3,}", choice["message"]["content"].replace("[redacted]", "")) == []


def test_only_the_sample_is_logged(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request outside of the sample is not logged, and each row has the share that was logged."""
    drawn = iter([0.2, 0.8, 0.1])
    monkeypatch.setattr("mlflow_llm.serving.frontend.invoke.random.random", lambda: next(drawn))
    client = place.client(PayloadLog(sample=0.5))
    asked = [_id(ask(place, client).json) for _ in range(3)]
    rows = place.logged()
    assert [row.request_id for row in rows] == [asked[2], asked[0]]
    assert {row.sample for row in rows} == {0.5}


def test_refused_requests_are_not_logged(place: Place) -> None:
    """Requests that are invalid, or beyond a limit, run nothing and are not logged."""
    client = place.client(PayloadLog())
    Limits(place.store).set("tenant", "acme", "qpm", 1)
    assert ask(place, client, CHAT | {"temperature": -1}).status_code == 400
    assert ask(place, client).status_code == 200
    assert ask(place, client).status_code == 429
    assert len(place.logged()) == 1


def test_a_body_that_is_too_long_is_left_out(place: Place) -> None:
    """The row of such a request says why it has no text; its reply is there."""
    client = place.client(PayloadLog())
    ask(place, client, CHAT | {"metadata": {"a": "b"}, "stop": None, "user": "u", "messages": CHAT["messages"]})
    body = json.dumps(CHAT).encode() + b" " * MAX_TEXT
    assert ask(place, client, body).status_code == 200
    long, short = place.logged()
    assert (long.request, long.codes, short.codes) == (None, ("MAX_REQUEST_SIZE_EXCEEDED",), ())
    assert long.response


def test_a_body_that_redaction_makes_too_long_is_left_out() -> None:
    """A pattern that replaces single characters multiplies a text: its length counts when it has been redacted."""
    body = json.dumps({"prompt": "x" * (MAX_TEXT // 4)}).encode()
    row = dataclasses.replace(captured(1), body=body, settings=PayloadLog(redact=("x",))).payload()
    assert (row.request, row.codes) == (None, ("MAX_REQUEST_SIZE_EXCEEDED",))


def test_arguments_of_calls_take_room() -> None:
    """The size of a finished request counts what its tool calls say."""
    call = ReplyCall(id="c", name="f", arguments="a" * 100)
    choice = Choice(index=0, text="", finish_reason="tool_calls", calls=(call,))
    assert dataclasses.replace(captured(1, 10), replies=[(choice, "tool_calls")]).size == 110


def captured(number: int, size: int = 10) -> Captured:
    row = Payload(
        request_id=f"r{number}", endpoint="assistant", entity="m", adapter=None, tenant="t", key_id="k",
        client_request_id=None, status_code=200, started_ms=0, duration_ms=1, sample=1.0, request=None, response=None,
    )  # fmt: skip
    return Captured(settings=PayloadLog(), row=row, task="chat", body=b'"' + b"x" * (size - 2) + b'"', replies=[])


def dropped() -> float:
    return metrics.OWN.get_sample_value("mlflow_llm_payloads_dropped_total", {"endpoint": "assistant"}) or 0.0


def test_the_queue_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bounds of the queue, in requests or bytes, requests are dropped and counted, and the log says so."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(payload_queue.logs, "event", lambda event, **fields: told.append(fields))
    monkeypatch.setattr(payload_queue, "MAX_QUEUED", 3)
    monkeypatch.setattr(payload_queue, "MAX_QUEUED_BYTES", 1000)
    before = dropped()
    for number, size in enumerate([900, 200, 50, 50, 5]):
        place.queue.put(captured(number, size))
    assert dropped() - before == 2  # 200 bytes are too many, and the fourth that stays is one too many
    assert [row.request_id for row in place.logged()] == ["r3", "r2", "r0"]
    place.queue.flush()  # it is told once
    assert told == [{"level": 30, "missing": 2}]


def test_a_store_that_is_away_loses_nothing_that_fits(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that cannot be written stays in the queue, in order, and is written when the store is back."""
    monkeypatch.setattr(payload_queue, "RETRY_SECONDS", 0.001)
    add, tries = place.payloads.add, iter([True, True, False])

    def away(*arguments: Any, **more: Any) -> None:
        if next(tries):
            raise Unavailable("the metering store does not answer", retry_after=1.0)
        add(*arguments, **more)

    monkeypatch.setattr(place.payloads, "add", away)
    for number in range(3):
        place.queue.put(captured(number))
    assert [row.request_id for row in place.logged()] == ["r2", "r1", "r0"]


def test_closing_writes_what_is_queued(place: Place) -> None:
    """The writer wakes by itself, and the end of a worker writes the rest."""
    place.queue.start()
    place.queue.put(captured(1))
    with gevent.Timeout(PATIENCE):
        while not list(place.payloads.rows("assistant", place.ledger.now_ms())):
            gevent.sleep(0.01)
    place.queue.put(captured(2))
    place.queue.close(PATIENCE)
    assert [row.request_id for row in place.payloads.rows("assistant", place.ledger.now_ms())] == ["r2", "r1"]


def test_closing_without_a_store_drops_and_counts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a worker does not wait for a store that is away."""

    def away(*arguments: Any, **more: Any) -> None:
        raise Unavailable("the metering store does not answer", retry_after=1.0)

    monkeypatch.setattr(place.payloads, "add", away)
    monkeypatch.setattr(payload_queue, "RETRY_SECONDS", 0.001)
    before = dropped()
    place.queue.start()
    place.queue.put(captured(1))
    place.queue.close(PATIENCE)
    assert dropped() - before == 1


def test_closing_counts_what_is_being_written(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that does not end before the worker must is given up, and its requests are counted."""
    begun, never = Event(), Event()

    def stuck(*arguments: Any, **more: Any) -> None:
        begun.set()
        never.wait()

    monkeypatch.setattr(place.payloads, "add", stuck)
    before = dropped()
    place.queue.start()
    place.queue.put(captured(1))
    assert begun.wait(PATIENCE)
    place.queue.put(captured(2))
    place.queue.close(0.01)
    assert dropped() - before == 2


def test_texts_are_for_managers(place: Place) -> None:
    """Only a key that manages reads or deletes texts, whatever tenant sent them: not even the tenant's own keys do."""
    client = place.client(PayloadLog())
    asked = _id(ask(place, client).json)
    place.logged()
    assert client.get(API, headers=place.head("worker")).status_code == 403
    assert client.delete(API, headers=place.head("worker")).status_code == 403
    found = client.get(API, headers=place.head("operator")).json
    assert ([row["request_id"] for row in found["payloads"]], found["next_cursor"]) == ([asked], None)
    (recent,) = client.get(REQUESTS, headers=place.head("operator")).json["requests"]
    assert (recent["request_id"], recent["has_payload"]) == (asked, True)
    assert client.delete(API, headers=place.head("operator")).json == {"deleted": 1}
    (recent,) = client.get(REQUESTS, headers=place.head("operator")).json["requests"]
    assert (recent["has_payload"], place.logged()) == (False, [])


def test_pages_files_and_mistakes(place: Place) -> None:
    """Pages follow their cursors, Parquet has every row, and a wrong parameter is a 400 that names it."""
    client, head = place.client(PayloadLog()), place.head("operator")
    for number in range(3):
        place.queue.put(captured(number))
    place.logged()
    first = client.get(f"{API}?limit=2", headers=head).json
    second = client.get(f"{API}?limit=2&cursor={first['next_cursor']}", headers=head).json
    names = [row["request_id"] for row in (*first["payloads"], *second["payloads"])]
    assert (names, second["next_cursor"]) == (["r2", "r1", "r0"], None)
    assert [row["request_id"] for row in client.get(f"{API}?request_id=r1", headers=head).json["payloads"]] == ["r1"]
    file = client.get(f"{API}?format=parquet", headers=head)
    assert (file.content_type, file.data[:4]) == ("application/vnd.apache.parquet", b"PAR1")
    for query in ("limit=0", "limit=201", "cursor=x", "format=csv", "tenant=a", "format=parquet&limit=1"):
        answer = client.get(f"{API}?{query}", headers=head)
        field = "limit" if query.startswith("format=parquet") else query.partition("=")[0]
        assert (answer.status_code, answer.json["message"].startswith(f"{field}: ")) == (400, True)
    assert client.get(API.replace("assistant", "nobody"), headers=head).status_code == 404
