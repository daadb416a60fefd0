"""Convert a finished request to an OpenTelemetry span, with MLflow's or OpenTelemetry's own attributes."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from ..dialects.openai.span_values import SPAN_TYPES, choices_of, token_usage
from ..interface.errors import RequestError
from ..interface.reply import Choice
from ..metering.accounts.money import MILLION, units
from .tracing import SpanRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

RESERVED = ("mlflow.", "mlflow_llm.")  # names of tags that are MLflow's and ours, not a caller's
_NO_NAME = re.compile(r"[^\w.\- :]")  # characters that a tag's name in MLflow has not
MAX_METADATA = 250  # characters of a value, which MLflow's database keeps of a trace's metadata
MODEL_ID = "mlflow.modelId"  # of a trace's metadata, by which MLflow finds the traces of a logged model
FIRST_TOKEN = "gen_ai.first_token"  # the name of an event


def readable_span(record: SpanRecord, attributes: dict[str, Any], resource: Any = None) -> ReadableSpan:
    """Return ``record`` as a finished OpenTelemetry span."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

    trace_id = int(record.trace.trace_id, 16)
    state = TraceState.from_header([record.trace.state]) if record.trace.state else None

    def context(span_id: str, remote: bool) -> SpanContext:
        return SpanContext(trace_id, int(span_id, 16), remote, TraceFlags(TraceFlags.SAMPLED), state)

    first = [] if record.first_ns is None else [Event(FIRST_TOKEN, {}, timestamp=record.first_ns)]
    return ReadableSpan(
        name=span_name(record),
        context=context(record.trace.span_id, False),
        parent=context(record.trace.parent_id, True) if record.trace.parent_id else None,
        resource=resource or Resource.get_empty(),
        attributes=attributes,
        events=first,
        kind=SpanKind.SERVER,
        status=Status(StatusCode.OK) if record.status < RequestError.status else Status(StatusCode.ERROR, record.error),
        start_time=record.start_ns,
        end_time=record.end_ns,
    )


def span_name(record: SpanRecord) -> str:
    return f"{record.task or 'request'} {record.endpoint}"


def usage(record: SpanRecord) -> dict[str, int] | None:
    """Return MLflow's token usage, or None if the request was refused before anything ran."""
    if record.prompt_tokens is None:
        return None
    return token_usage(record.prompt_tokens, record.cached_tokens, record.completion_tokens)


def costs(record: SpanRecord) -> dict[str, float] | None:
    """Return MLflow's costs, in the currency of the ledger; None if tokens have no price."""
    if record.costs is None:
        return None
    prompt, completion = record.costs
    micro = {"input_cost": prompt, "output_cost": completion, "total_cost": prompt + completion}
    return {name: value / MILLION for name, value in micro.items()}


def model(record: SpanRecord) -> str:
    return f"{record.endpoint}:{record.adapter}" if record.adapter else record.endpoint


def outputs(record: SpanRecord) -> Any:
    """Return the reply in OpenAI's form, which MLflow's UI shows as a conversation; None if content is not traced."""
    if record.replies is None:
        return None
    shown = choices_of(record.task, (choice for choice, _ in record.replies))
    choices = [{**one, "finish_reason": reason} for one, (_, reason) in zip(shown, record.replies, strict=True)]
    return {"model": model(record), "choices": choices}


def preview(reply: tuple[Choice, str | None]) -> str:
    """Return the text of a choice, or its tool calls if it has no text."""
    choice, _ = reply
    return choice.text or "\n".join(f"{call.name}({call.arguments})" for call in choice.calls)


def inputs(record: SpanRecord) -> Any:
    if record.body is None:
        return None
    try:
        return json.loads(record.body)
    except ValueError:
        return record.body.decode(errors="replace")


def mlflow_attributes(record: SpanRecord) -> dict[str, str]:
    """Return the attributes that MLflow knows, and ours; MLflow stores every value as JSON."""
    found: dict[str, Any] = {
        "mlflow.traceRequestId": f"tr-{record.trace.trace_id}",
        "mlflow.spanType": SPAN_TYPES.get(record.task, "UNKNOWN"),
        "mlflow.spanInputs": inputs(record),
        "mlflow.spanOutputs": outputs(record),
        "mlflow.chat.tokenUsage": usage(record),
        "mlflow.llm.cost": costs(record),
        "mlflow.llm.model": model(record),
        "mlflow.llm.provider": "mlflow-llm",
        "mlflow.message.format": "openai",
        "mlflow.trace.user": record.labels.user or None,
        "mlflow.trace.session": record.labels.session or None,
        **_facts(record),
    }
    return {name: json.dumps(value, ensure_ascii=False) for name, value in found.items() if value is not None}


def semantic_attributes(record: SpanRecord) -> dict[str, Any]:
    """Return OpenTelemetry's attributes for generative AI, and ours."""
    found: dict[str, Any] = {
        "gen_ai.operation.name": {"completions": "text_completion"}.get(record.task, record.task),
        "gen_ai.provider.name": "mlflow-llm",
        "gen_ai.request.model": model(record),
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.response.id": record.reply_id or None,
        "gen_ai.response.finish_reasons": [record.finish_reason] if record.finish_reason else None,
        "gen_ai.input.messages": None if record.body is None else record.body.decode(errors="replace"),
        "gen_ai.conversation.id": record.labels.session or None,
        "user.id": record.labels.user or None,
        "gen_ai.output.messages": None if record.replies is None else json.dumps(list(map(preview, record.replies))),
        **_facts(record),
    }
    return {name: value for name, value in found.items() if value is not None}


def _facts(record: SpanRecord) -> dict[str, Any]:
    return {
        "mlflow_llm.request_id": record.request_id,
        **_answered_by(record),
        **{f"mlflow_llm.tags.{name}": value for name, value in record.labels.tags.items()},
        "mlflow_llm.client_request_id": record.labels.client_request_id or None,
        "mlflow_llm.stream": record.stream,
        "mlflow_llm.finish_reason": record.finish_reason,
        "mlflow_llm.time_to_first_token_ms": _ttft_ms(record),
        "mlflow_llm.cost": None if record.costs is None else units(sum(record.costs)),
        "http.response.status_code": record.status,
    }


def _ttft_ms(record: SpanRecord) -> float | None:
    return None if record.first_ns is None else round((record.first_ns - record.start_ns) / 1e6, 3)


def _answered_by(record: SpanRecord) -> dict[str, str]:
    """Return the endpoint, and which version of which model answered, as far as known."""
    found = {
        "mlflow_llm.endpoint": record.endpoint,
        "mlflow_llm.entity": record.entity,
        "mlflow_llm.model_version": record.model.label,
        "mlflow_llm.content_hash": record.model.content_hash,
        "mlflow_llm.adapter": record.adapter,
    }
    return {name: value for name, value in found.items() if value}


def trace_info(record: SpanRecord, experiment_id: str, model_id: str | None = None) -> Any:
    """Return MLflow's ``TraceInfo`` for a trace that begins here; ``model_id`` is the logged model that answered."""
    from mlflow.entities import TraceInfo, TraceLocation, TraceState

    facts = trace_facts(record)
    if model_id is not None:
        facts["trace_metadata"][MODEL_ID] = model_id
    return TraceInfo(
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=record.start_ns // 1_000_000,
        execution_duration=duration_ms(record),
        state=TraceState.OK if record.status < RequestError.status else TraceState.ERROR,
        **facts,
    )


def duration_ms(record: SpanRecord) -> int:
    return (record.end_ns - record.start_ns) // 1_000_000


def trace_facts(record: SpanRecord) -> dict[str, Any]:
    """Return the fields of a ``TraceInfo`` that do not depend on where the trace is kept, and are texts."""
    metadata = {"mlflow.trace_schema.version": "3"}
    if found := usage(record):
        metadata["mlflow.trace.tokenUsage"] = json.dumps(found)
    if record.costs is not None:
        metadata["mlflow.trace.cost"] = json.dumps(costs(record))
    labels = record.labels
    for name, value in (("mlflow.trace.user", labels.user), ("mlflow.trace.session", labels.session)):
        if value:
            metadata[name] = value[:MAX_METADATA]
    own = {_NO_NAME.sub("_", name): value for name, value in labels.tags.items() if not name.startswith(RESERVED)}
    return {
        "trace_id": f"tr-{record.trace.trace_id}",
        "client_request_id": labels.client_request_id or record.request_id,
        "request_preview": None if record.body is None else record.body.decode(errors="replace")[:1000],
        "response_preview": None if record.replies is None else "\n".join(map(preview, record.replies))[:1000],
        "trace_metadata": metadata,
        "tags": own | {"mlflow.traceName": span_name(record)} | _answered_by(record),
    }
