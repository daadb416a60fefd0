"""Labels and the version that answers, from a request over HTTP to its answer, log line, metrics, ledger and trace."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from flask.testing import FlaskClient
from mlflow.entities import Trace
from prometheus_client.parser import text_string_to_metric_families

from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.metering import Keys, Ledger, Store
from mlflow_llm.serving.model_files.model_version import ModelVersion
from mlflow_llm.serving.modes import PayPerToken
from mlflow_llm.serving.observability.spans import mlflow_attributes, semantic_attributes, trace_info
from mlflow_llm.serving.observability.tracing import SpanRecord, Tracer
from mlflow_llm.serving.routing.served_endpoints import ServedEndpoints
from mlflow_llm.serving.system import logs

CHAT: dict[str, Any] = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
TOO_LONG = [{"role": "user", "content": "x" * 9000}]
TAGS = {"team": "search", "session_id": "s1"}
LABELS = {"user": "ada", "client_request_id": "c1", "usage_context": TAGS}
MODEL = ModelVersion(name="secret project", version="7", content_hash="0123456789abcdef" * 4)
PATH = "/serving-endpoints/chat/completions"


class Place:
    """A server with a ledger, a tracer and a model from a registry; ``lines`` is its log, ``spans`` its traces."""

    def __init__(self, make: Callable[..., WorkerState], store: Store, root: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        sent: list[bytes] = []
        self._sent = sent
        self.ledger = Ledger(store, state_dir=root)
        self.keys = Keys(store)
        tracer = Tracer(1.0, send=lambda data: sent.append(data) is None)
        server = make(mode=PayPerToken(self.ledger), ledger=self.ledger, keys=self.keys, tracer=tracer)
        (entity,) = server.endpoints.entities()
        endpoints = ServedEndpoints(dataclasses.replace(entity, identity=MODEL))
        self.server = dataclasses.replace(server, endpoints=endpoints)
        self.client: FlaskClient = create_app(self.server).test_client()

    def key(self, *scopes: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys.create('acme', scopes=scopes)[0]}"}

    @property
    def spans(self) -> list[SpanRecord]:
        return [msgspec.msgpack.decode(data, type=SpanRecord) for data in self._sent]


@pytest.fixture
def place(make: Callable[..., WorkerState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    store = Store(f"sqlite:///{tmp_path}/ledger.db")
    found = Place(make, store, tmp_path)
    monkeypatch.setattr(logs, "event", lambda name, **fields: found.lines.append({"event": name, **fields}))
    yield found
    found.ledger.close()
    store.close()


def test_labels_go_where_requests_are_recorded(place: Place) -> None:
    """Log line, ledger and trace have what the caller said, and usage can be asked for by it."""
    headers = place.key("invoke", "usage")
    assert place.client.post(PATH, json=CHAT | LABELS, headers=headers).status_code == 200
    assert place.client.post(PATH, json=CHAT, headers=headers).status_code == 200
    labelled, plain = place.lines
    assert (labelled["user"], labelled["client_request_id"], labelled["tags"]) == ("ada", "c1", TAGS)
    assert (plain["user"], plain["client_request_id"], plain["tags"]) == (None, None, None)
    (row,) = place.client.get("/api/2.0/usage?tag=team=search&end_user=ada", headers=headers).json["usage"]
    assert (row["end_user"], row["client_request_id"], row["tags"]) == ("ada", "c1", TAGS)
    sums = place.client.get("/api/2.0/usage?by=tags.team,end_user", headers=headers).json["usage"]
    assert [(one["tags.team"], one["end_user"], one["requests"]) for one in sums] == [("", "", 1), ("search", "ada", 1)]
    info, bare = (trace_info(span, "0") for span in place.spans)
    assert info.trace_metadata["mlflow.trace.user"] == "ada"
    assert info.trace_metadata["mlflow.trace.session"] == "s1"
    assert (info.client_request_id, bare.client_request_id) == ("c1", plain["request_id"])
    assert TAGS.items() <= info.tags.items()
    assert {"mlflow.trace.user", "mlflow.trace.session"}.isdisjoint(bare.trace_metadata)
    attributes = mlflow_attributes(place.spans[0])
    assert json.loads(attributes["mlflow.trace.user"]) == "ada"
    assert semantic_attributes(place.spans[0])["user.id"] == "ada"
    assert semantic_attributes(place.spans[0])["gen_ai.conversation.id"] == "s1"


def test_a_callers_tag_replaces_none_of_ours(place: Place) -> None:
    """A label cannot rename the trace or its endpoint, and a name that MLflow has no tag for is made one."""
    tags = {"mlflow.traceName": "x", "mlflow_llm.endpoint": "x", "a/b": "c"}
    body = CHAT | {"usage_context": tags}
    assert place.client.post(PATH, json=body, headers=place.key("invoke")).status_code == 200
    found = trace_info(place.spans[0], "0").tags
    assert (found["mlflow.traceName"], found["mlflow_llm.endpoint"]) == ("chat assistant", "assistant")
    assert found["a_b"] == "c"
    assert place.lines[0]["tags"] == tags


def test_the_version_that_answers_is_recorded(place: Place) -> None:
    """Name, version and content hash are in log, ledger and trace, and in the metrics by entity."""
    headers = place.key("invoke", "manage")
    assert place.client.post(PATH, json=CHAT, headers=headers).status_code == 200
    (line,) = place.lines
    seen = (line["entity"], line["model_version"], line["content_hash"])
    assert seen == ("model-1", "secret project/7", MODEL.short_hash)
    (row,) = place.client.get("/api/2.0/usage?model_version=secret%20project/7", headers=headers).json["usage"]
    assert (row["model_version"], row["content_hash"]) == ("secret project/7", MODEL.content_hash)
    attributes = semantic_attributes(place.spans[0])
    assert attributes["mlflow_llm.entity"] == "model-1"
    assert attributes["mlflow_llm.model_version"] == "secret project/7"
    assert attributes["mlflow_llm.content_hash"] == MODEL.content_hash
    samples = {  # the registry is the process's: other tests leave samples of other entities
        sample.name: sample.labels
        for family in text_string_to_metric_families(place.client.get("/metrics", headers=headers).text)
        for sample in family.samples
        if (sample.labels.get("endpoint"), sample.labels.get("entity")) == ("assistant", "model-1")
    }
    named = {"name": MODEL.name, "version": "7", "content_hash": MODEL.content_hash}
    assert samples["mlflow_llm_model_info"] == {"endpoint": "assistant", "entity": "model-1"} | named
    assert {f"mlflow_llm_{name}" for name in ("requests_total", "tokens_total", "request_seconds_count")} <= set(
        samples
    )


@pytest.mark.parametrize("fields", [{}, {"temperature": 9}, {"messages": TOO_LONG}, {"stream": True}])
def test_answers_and_errors_say_who_answered(place: Place, fields: dict[str, Any]) -> None:
    """Also a request that its endpoint refuses; the model's name in the registry is for who manages."""
    for scopes, version in ((("invoke", "manage"), "secret%20project/7"), (("invoke",), "7")):
        answer = place.client.post(PATH, json=CHAT | fields, headers=place.key(*scopes))
        if fields.get("temperature"):  # refused before the endpoint was known
            assert (answer.status_code, answer.headers.get("served-model-name")) == (400, None)
            continue
        assert answer.status_code == (400 if "messages" in fields else 200)
        assert answer.headers["served-model-name"] == "model-1"
        assert answer.headers["served-model-version"].replace(" ", "%20") == version
        assert answer.headers["served-model-hash"] == MODEL.short_hash


def test_lists_of_models_show_versions(place: Place) -> None:
    """Each served entity with its version and content; the model's name in the registry is for who manages."""
    for scopes, name in ((("invoke", "manage"), {"model_name": MODEL.name}), (("invoke",), {})):
        for path in ("/v1/models", "/v1/models/assistant"):
            found = place.client.get(path, headers=place.key(*scopes)).json
            (served,) = (found["data"][0] if "data" in found else found)["served_models"]
            expected = {"name": "model-1", "model_version": "7", "content_hash": MODEL.content_hash}
            assert served == expected | name


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_has_its_trace(make: Callable[..., WorkerState], stream: bool) -> None:
    """``return_trace`` adds the trace to a reply, the last event of a stream, of a server that traces nothing."""
    client = create_app(make()).test_client()
    asked = CHAT | {"databricks_options": {"return_trace": True}, "stream": stream, **LABELS}
    plain = client.post(PATH, json=asked | {"databricks_options": {"return_trace": False}})
    reply = client.post(PATH, json=asked)
    assert reply.status_code == 200
    assert "databricks_output" not in plain.text
    events = [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n") if "{" in line]
    assert ["databricks_output" in event for event in events] == [False] * (len(events) - 1) + [True]
    last = events[-1]
    trace = Trace.from_dict(last["databricks_output"]["trace"])
    (span,) = trace.data.spans
    assert (trace.info.client_request_id, trace.info.tags["team"]) == ("c1", "search")
    assert span.inputs == asked
    assert span.attributes["mlflow.chat.tokenUsage"]["output_tokens"] == last["usage"]["completion_tokens"]
    texts = [choice.get("delta", choice.get("message")).get("content") or "" for e in events for choice in e["choices"]]
    assert span.outputs["choices"][0]["message"]["content"] == "".join(texts)


def test_a_returned_trace_is_for_the_caller_only(place: Place) -> None:
    """The exported trace of the same request has the same ids, and no content unless content is traced."""
    asked = CHAT | {"databricks_options": {"return_trace": True}}
    reply = place.client.post(PATH, json=asked, headers=place.key("invoke")).json
    (span,) = place.spans
    assert reply["databricks_output"]["trace"]["info"]["trace_id"] == f"tr-{span.trace.trace_id}"
    assert (span.body, span.replies) == (None, None)


def test_completions_have_traces(make: Callable[..., WorkerState]) -> None:
    """A completion has its trace too, with n choices, and with usage in an event of its own."""
    client = create_app(make()).test_client()
    asked = {
        "model": "assistant",
        "prompt": "Hi",
        "max_tokens": 2,
        "n": 2,
        "databricks_options": {"return_trace": True},
    }
    reply = client.post("/serving-endpoints/completions", json=asked).json
    (span,) = Trace.from_dict(reply["databricks_output"]["trace"]).data.spans
    assert [c["text"] for c in span.outputs["choices"]] == [c["text"] for c in reply["choices"]]
    more = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = client.post("/serving-endpoints/completions", json=asked | more).text
    *_, last, done, _ = streamed.split("\n\n")
    assert (done, "databricks_output" in last, '"choices":[]' in last) == ("data: [DONE]", True, True)
