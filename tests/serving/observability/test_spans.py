"""A finished request as a span: what is shown of a reply that is not text alone."""

from __future__ import annotations

import json

import msgspec

from mlflow_llm.serving.interface.reply import CallDelta, Delta, Ended
from mlflow_llm.serving.interface.request import Sequence, ValidRequest
from mlflow_llm.serving.observability.access_record import AccessRecord
from mlflow_llm.serving.observability.spans import mlflow_attributes, semantic_attributes
from mlflow_llm.serving.observability.tracing import SpanRecord, TraceContext, Tracer


def test_calls_and_reasoning_are_in_a_trace() -> None:
    """A span with traced content has calls and reasoning as the caller got them, and empty choices too."""
    sent: list[bytes] = []
    tracer = Tracer(1.0, content=True, send=lambda data: sent.append(data) is None)
    trace = TraceContext("4b" * 16, "00" * 7 + "01", None, True)
    record = AccessRecord(request_id="r", method="POST", path="/v1", trace=trace, tracer=tracer, endpoint="e")
    sequences = (Sequence(prompt_token_ids=(1,)),) * 2
    record.accept(ValidRequest(request_id="r", task="chat", model="e", sequences=sequences, n=2), b"{}")
    for piece in (
        Delta(index=0, text="", reasoning="Hm.", num_tokens=1),
        Delta(index=0, text="", calls=(CallDelta(index=0, id="c", name="find"),), num_tokens=1),
        Delta(index=0, text="", calls=(CallDelta(index=0, arguments="{}"),), num_tokens=1),
        Ended(index=0, finish_reason="tool_calls"),
        Ended(index=1, finish_reason="stop"),
    ):
        record.see(piece)
    record.finish(200)
    span = msgspec.msgpack.decode(sent[0], type=SpanRecord)
    called, silent = json.loads(mlflow_attributes(span)["mlflow.spanOutputs"])["choices"]
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    expected = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    assert (called["message"], called["finish_reason"]) == (expected, "tool_calls")
    assert (silent["message"]["content"], silent["finish_reason"]) == ("", "stop")
    assert json.loads(semantic_attributes(span)["gen_ai.output.messages"]) == ["find({})", ""]
