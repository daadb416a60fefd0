"""The trace in a reply is what MLflow itself would write of the same request."""

from __future__ import annotations

import msgspec
import pytest
from mlflow.entities import Span, Trace, TraceData

from mlflow_llm.serving.interface.labels import Labels
from mlflow_llm.serving.interface.reply import Choice
from mlflow_llm.serving.observability.returned_trace import returned_trace
from mlflow_llm.serving.observability.spans import mlflow_attributes, readable_span, trace_info
from mlflow_llm.serving.observability.tracing import SpanRecord, TraceContext

RECORD = SpanRecord(
    trace=TraceContext("4b" * 16, "00" * 7 + "01", None, False),
    request_id="r",
    reply_id="abc",
    task="chat",
    endpoint="assistant",
    entity="assistant-7",
    labels=Labels(user="ada", client_request_id="c1", tags={"team": "search", "session_id": "s1"}),
    status=200,
    finish_reason="stop",
    start_ns=1_700_000_000_003_456_789,
    end_ns=1_700_000_001_223_456_789,
    prompt_tokens=3,
    completion_tokens=2,
    body=b'{"messages": []}',
    replies=[(Choice(index=0, text="Hi.", finish_reason="stop"), "stop")],
)


@pytest.mark.parametrize("first_ns", [None, 1_700_000_000_103_456_789])
def test_a_returned_trace_is_mlflows_own(first_ns: int | None) -> None:
    """Info and span have the form of MLflow's ``Trace.to_dict``, except that the trace is in no experiment yet."""
    record = msgspec.structs.replace(RECORD, first_ns=first_ns)
    expected = Trace(
        trace_info(record, "0"), TraceData([Span(readable_span(record, mlflow_attributes(record)))])
    ).to_dict()
    found = returned_trace(record)
    attributes = found["data"]["spans"][0]["attributes"]
    assert attributes.get("mlflow_llm.time_to_first_token_ms") == (None if first_ns is None else "100.0")
    expected["info"].pop("trace_location")
    assert found["info"].pop("trace_location") == {"type": "TRACE_LOCATION_TYPE_UNSPECIFIED"}
    assert found == expected


def test_mlflow_reads_a_returned_trace() -> None:
    """MLflow's own reader gets the conversation, the counts and the labels, and no experiment."""
    trace = Trace.from_dict(returned_trace(RECORD))
    (span,) = trace.data.spans
    assert (trace.info.state, trace.info.experiment_id, trace.info.tags["team"]) == ("OK", None, "search")
    assert (span.inputs, span.outputs["choices"][0]["message"]["content"]) == ({"messages": []}, "Hi.")
    assert span.attributes["mlflow.chat.tokenUsage"]["total_tokens"] == 5


def test_a_returned_trace_has_a_root() -> None:
    """The span of a request that continues its caller's trace is a root in its reply: MLflow copies no other trace."""
    record = msgspec.structs.replace(RECORD, trace=RECORD.trace._replace(parent_id="01" * 8))
    assert returned_trace(record)["data"]["spans"][0]["parent_span_id"] is None
