"""The logged model and the cost of a request in its trace, as MLflow finds and shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import msgspec
import pytest
from stores import empty_store, own_stores

from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.metering import Ledger, Price, Store, Usage, UsageFilter
from mlflow_llm.serving.model_files.model_version import ModelVersion
from mlflow_llm.serving.modes import PayPerToken
from mlflow_llm.serving.observability.spans import semantic_attributes
from mlflow_llm.serving.observability.trace_exporter import MlflowSink
from mlflow_llm.serving.observability.tracing import SpanRecord, Tracer, begin

CHAT: dict[str, Any] = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
RECORD = SpanRecord(
    trace=begin(sampled=True),
    request_id="r",
    task="chat",
    endpoint="assistant",
    status=200,
    start_ns=1_700_000_000_000_000_000,
    end_ns=1_700_000_001_000_000_000,
    prompt_tokens=30,
    completion_tokens=2,
    costs=(90, 30),
)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[mlflow.MlflowClient]:
    """Return a client of a database of its own, which the exporter's sink uses too."""
    store = empty_store(tmp_path)
    with own_stores(store):
        yield mlflow.MlflowClient(store)


def test_mlflow_finds_the_traces_of_a_logged_model(client: mlflow.MlflowClient) -> None:
    """A trace of a registered version has the logged model's id and the cost; one of a forgotten version has no id."""
    sink = MlflowSink("served")
    logged = client.create_logged_model(sink.experiment_id, name="llm")
    client.create_registered_model("assistant")
    version = client.create_model_version("assistant", f"models:/{logged.model_id}").version
    known = ModelVersion(name="assistant", version=str(version), content_hash="ab" * 32)
    again = begin(sampled=True)
    other = msgspec.structs.replace(known, version="99")
    sink.export(
        [
            msgspec.structs.replace(RECORD, model=known),
            msgspec.structs.replace(RECORD, model=other, trace=again, costs=None),
        ]
    )
    where = [sink.experiment_id]
    (trace,) = client.search_traces(locations=where, model_id=logged.model_id)
    assert trace.info.trace_id == f"tr-{RECORD.trace.trace_id}"
    cost = {"input_cost": 0.00009, "output_cost": 0.00003, "total_cost": 0.00012}
    assert trace.info.cost == cost
    assert trace.data.spans[0].get_attribute("mlflow.llm.cost") == cost
    found = {trace.info.trace_id: trace.info for trace in client.search_traces(locations=where)}
    bare = found[f"tr-{again.trace_id}"]
    assert ("mlflow.modelId" in bare.trace_metadata, bare.cost) == (False, None)


def test_a_span_has_the_cost_of_the_ledger(make: Callable[..., WorkerState], tmp_path: Path) -> None:
    """Prompt and completion together cost what the row does, exactly; without a price there is no cost."""
    sent: list[bytes] = []
    store = Store(f"sqlite:///{tmp_path}/ledger.db")
    ledger = Ledger(store, state_dir=tmp_path)
    tracer = Tracer(1.0, send=lambda data: sent.append(data) is None)
    client = create_app(make(mode=PayPerToken(ledger), ledger=ledger, tracer=tracer)).test_client()
    try:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        ledger.prices.set("*", Price(input=3_000_000, cached=300_000, output=15_000_000))
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        free, paid = (msgspec.msgpack.decode(data, type=SpanRecord) for data in sent)
        rows = sorted(Usage(store).rows(UsageFilter()), key=lambda row: row.cost)
    finally:
        ledger.close()
        store.close()
    assert free.costs is None
    assert sum(paid.costs) == rows[-1].cost > 0
    assert paid.costs[1] == 15 * rows[-1].completion_tokens
    assert float(semantic_attributes(paid)["mlflow_llm.cost"]) == pytest.approx(rows[-1].cost / 1e6)
