"""The trace of a finished request as its own reply contains it: MLflow's ``Trace.to_dict()``, made without MLflow."""

from __future__ import annotations

import base64
import datetime
from typing import Any

from .spans import FIRST_TOKEN, duration_ms, mlflow_attributes, span_name, trace_facts
from .tracing import SpanRecord

# In no experiment that the caller could know: MLflow's clients copy such a trace to their own.
_NOWHERE = {"type": "TRACE_LOCATION_TYPE_UNSPECIFIED"}


def returned_trace(record: SpanRecord) -> dict[str, Any]:
    """Return the trace of a request that succeeded. Its span is the root, also if the request continues a trace of its
    caller: MLflow's clients refuse a trace without a root."""
    facts = {name: value for name, value in trace_facts(record).items() if value is not None}
    return {
        "info": {
            **facts,
            "trace_location": _NOWHERE,
            "request_time": _timestamp(record.start_ns),
            "state": "OK",
            "execution_duration_ms": duration_ms(record),
        },
        "data": {"spans": [_span(record)]},
    }


def _span(record: SpanRecord) -> dict[str, Any]:
    events = [] if record.first_ns is None else [{"name": FIRST_TOKEN, "time_unix_nano": record.first_ns}]
    return {
        "trace_id": _base64(record.trace.trace_id),
        "span_id": _base64(record.trace.span_id),
        "parent_span_id": None,
        "name": span_name(record),
        "start_time_unix_nano": record.start_ns,
        "end_time_unix_nano": record.end_ns,
        "events": [{**event, "attributes": {}} for event in events],
        "status": {"code": "STATUS_CODE_OK", "message": ""},
        "attributes": mlflow_attributes(record),
        "links": [],
    }


def _base64(digits: str) -> str:
    return base64.b64encode(bytes.fromhex(digits)).decode()


def _timestamp(nanoseconds: int) -> str:
    """Return a time as protobuf's JSON has it, in milliseconds."""
    moment = datetime.datetime.fromtimestamp(nanoseconds // 1_000_000_000, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{nanoseconds // 1_000_000 % 1000:03d}Z"
