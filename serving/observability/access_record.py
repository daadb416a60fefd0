"""The access record: the facts about one request for the log, metrics and traces."""

from __future__ import annotations

import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ..interface.errors import Aborted
from ..interface.labels import NONE, Labels
from ..interface.reply import Choice, Delta, Done, Ended, Piece, Score, Usage, Vector
from ..interface.request import ValidRequest
from ..metering.accounts.money import FREE, Price, cost
from ..metering.proof.answers import OutputHashes
from ..metering.usage.payloads import Payload
from ..model_files.model_version import UNKNOWN, ModelVersion
from ..system import logs
from ..tasks.reply.pieces import Gathered
from . import metrics, tracing
from .metrics import labeled
from .payload_capture import Capture, Captured, Reply
from .returned_trace import returned_trace
from .tracing import MAX_CONTENT, SpanRecord, TraceContext, Tracer

REQUEST_ID = "X-Request-Id"
MANAGEMENT = "/api/2.0/"
_CALLERS_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_from(header: str | None) -> str:
    """Return the caller's own ``X-Request-Id`` if it is short and plain, otherwise a new id."""
    return header if header and _CALLERS_ID.fullmatch(header) else f"req-{uuid.uuid4().hex}"


@dataclass(slots=True, kw_only=True)
class AccessRecord:
    """The record of one request. Times are seconds of ``time.perf_counter``.

    ``finish`` logs and counts the request; a second call does nothing. ``headers`` are added to those of the response,
    also to an error's. ``reply_id`` is the reply's ``id``, also in the ledger. ``body`` and ``replies`` (by choice)
    are only kept if content is traced, or if the reply has the trace; ``replies`` also for the payload log, for which
    ``capture`` has the rest. ``output`` hashes the answer of a metered request.
    """

    request_id: str
    method: str
    path: str
    endpoint: str = ""
    entity: str = ""
    model: ModelVersion = UNKNOWN
    adapter: str = ""
    task: str = ""
    stream: bool = False
    trace: TraceContext | None = None
    tracer: Tracer = tracing.OFF
    reply_id: str = ""
    body: bytes | None = None
    replies: dict[int, Gathered] | None = None
    capture: Capture | None = None
    output: OutputHashes | None = None
    body_digest: bytes = b""
    reasons: dict[int, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    key: str | None = None
    labels: Labels = NONE
    price: Price = FREE
    started: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None
    delivered: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    usage: Usage | None = None
    finish_reason: str | None = None
    finished: bool = False
    headers: dict[str, str] = field(default_factory=dict)

    def accept(self, request: ValidRequest, body: bytes) -> None:
        """Record a valid request, and its ``body`` if content is traced or the caller asks for the trace.

        Call this only after validation: a name that a caller merely sends (an adapter's) must not become a label of the
        metrics.
        """
        self.task, self.adapter, self.stream = request.task, request.adapter or "", request.stream
        self.reply_id, self.prompt_tokens = request.request_id, request.num_prompt_tokens
        if request.return_trace and self.trace is None:
            self.trace = tracing.begin(sampled=False)
        if request.return_trace or (self.tracer.content and self.trace is not None and self.trace.sampled):
            self.body, self.replies = body[:MAX_CONTENT], {}

    def keep_texts(self, capture: Capture) -> None:
        """Keep the texts of the request for the payload log."""
        self.capture = capture
        self.replies = {} if self.replies is None else self.replies

    def see(self, piece: Piece) -> None:
        """Record a piece on its way to the caller."""
        if isinstance(piece, Delta):
            self._see_tokens(piece)
        elif isinstance(piece, Ended):
            self.finish_reason = self.reasons[piece.index] = piece.finish_reason
            if self.output is not None:
                self.output.add_text(piece.index, "")  # an empty choice is a choice too
            if self.replies is not None:
                self.replies.setdefault(piece.index, Gathered())  # an empty choice is a choice too
        elif isinstance(piece, Done):
            self.usage = piece.usage
        elif isinstance(piece, Vector | Score):
            self.last = time.perf_counter()

    def _see_tokens(self, delta: Delta) -> None:
        self.count(delta.index, delta.num_tokens)
        if self.output is not None:
            self.output.add(delta)
        if self.replies is not None and (delta.text or delta.reasoning or delta.calls):
            said = replace(delta, token_ids=(), logprobs=(), token_logprobs=())
            self.replies.setdefault(delta.index, Gathered()).add(said)

    def count(self, index: int, num_tokens: int) -> None:
        """Record ``num_tokens`` tokens of choice ``index``; sufficient for text if no content is traced."""
        self.last = time.perf_counter()
        if num_tokens:
            if self.first is None:
                self.first = self.last
            self.delivered += num_tokens
            # tokens that arrive together with the choice's first one say nothing about the time between tokens
            before = self.counts.get(index)
            self.counts[index] = 0 if before is None else before + num_tokens

    def returned_trace(self) -> dict[str, Any]:
        """Return the trace of the request as it is now: its last piece has been seen, but not sent."""
        return returned_trace(self._span(200, None, time.perf_counter() - self.started))

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None for a reply that is not streamed, whose tokens arrive in groups."""
        return None if self.first is None or not self.stream else self.first - self.started

    def finish(self, status: int, error: str | None = None) -> None:
        if self.finished:
            return
        self.finished = True
        seconds = time.perf_counter() - self.started
        if not self.endpoint:
            metrics.REQUESTS.labels("", "", "", "", str(status)).inc()
        else:
            self._measure(status, seconds)
            if self.trace is not None and self.trace.sampled:
                span = self._span(status, error, seconds)
                self.tracer.export(span if self.tracer.content else replace(span, body=None, replies=None))
        if self.capture is not None and self.capture.admitted:
            self.capture.send(self._captured(self.capture, status, seconds))
        logs.event(
            "request",
            level=self._level(status),
            request_id=self.request_id,
            reply_id=self.reply_id or None,
            trace_id=self.trace.trace_id if self.trace else None,
            span_id=self.trace.span_id if self.trace and self.trace.sampled else None,
            parent_id=self.trace.parent_id if self.trace else None,
            method=self.method,
            path=self.path,
            status=status,
            endpoint=self.endpoint or None,
            entity=self.entity or None,
            model_version=self.model.label or None,
            content_hash=self.model.short_hash or None,
            adapter=self.adapter or None,
            key=self.key,
            user=self.labels.user or None,
            client_request_id=self.labels.client_request_id or None,
            tags=self.labels.tags or None,
            task=self.task or None,
            stream=self.stream or None,
            prompt_tokens=self._counts()["prompt"] or None,
            completion_tokens=self._counts()["completion"] or None,
            finish_reason=self.finish_reason,
            ttft_ms=None if self.ttft is None else round(self.ttft * 1e3, 3),
            duration_ms=round(seconds * 1e3, 3),
            error=error,
        )

    def _captured(self, capture: Capture, status: int, seconds: float) -> Captured:
        row = Payload(
            request_id=capture.shadow_of or self.reply_id,
            endpoint=self.endpoint,
            entity=self.entity,
            model_version=self.model.label or None,
            shadow=bool(capture.shadow_of),
            adapter=self.adapter or None,
            tenant=capture.tenant,
            key_id=capture.key_id,
            client_request_id=self.labels.client_request_id or None,
            status_code=status,
            started_ms=int((time.time() - seconds) * 1000),
            duration_ms=round(seconds * 1000),
            sample=capture.settings.sample,
            request=None,
            response=None,
        )
        return Captured(
            settings=capture.settings,
            row=row,
            task=self.task,
            body=capture.body,
            replies=self._said(),
        )

    def _said(self) -> list[Reply]:
        """Return the choices so far, each with the reason of its end; None if it was cut off."""
        replies = self.replies or {}
        return [(replies[i].choice(i), self.reasons.get(i)) for i in sorted(replies)]

    def _level(self, status: int) -> int:
        """Return the log level: debug for a successful GET of the management API, since clients poll it."""
        found = self.method == "GET" and status == 200 and self.path.startswith(MANAGEMENT)
        return logging.DEBUG if found else logging.INFO

    def _counts(self) -> dict[str, int]:
        """Return the tokens by kind: from the usage, or those delivered until the request was cut off."""
        if self.usage is not None:
            used = self.usage
            return {"prompt": used.prompt_tokens, "cached": used.cached_tokens, "completion": used.completion_tokens}
        return {"prompt": self.prompt_tokens if self.delivered else 0, "cached": 0, "completion": self.delivered}

    def _measure(self, status: int, seconds: float) -> None:
        labels = (self.endpoint, self.entity, self.adapter)
        labeled(metrics.REQUESTS, *labels, self.task, str(status)).inc()
        labeled(metrics.E2E, *labels).observe(seconds)
        if status == Aborted.status:
            metrics.DISCONNECTS.labels(*labels).inc()
        if self.ttft is not None:
            labeled(metrics.TTFT, *labels).observe(self.ttft)
        longest = max(self.counts.values(), default=0)
        if self.first is not None and self.last is not None and longest:
            labeled(metrics.TPOT, *labels).observe((self.last - self.first) / longest)
        for kind, count in self._counts().items():
            labeled(metrics.TOKENS, *labels, kind).inc(count)

    def _costs(self) -> tuple[int, int] | None:
        """Return what prompt and completion cost, in micro-units; None if tokens have no price here."""
        if self.price == FREE:
            return None
        counts = self._counts()
        prompt = cost(self.price, prompt=counts["prompt"], cached=counts["cached"], completion=0)
        return prompt, cost(self.price, **counts) - prompt

    def _span(self, status: int, error: str | None, seconds: float) -> SpanRecord:
        assert self.trace is not None
        end = time.time_ns()
        start = end - int(seconds * 1e9)
        counts = self._counts()
        shown = [(_shortened(choice), reason) for choice, reason in self._said()]
        return SpanRecord(
            trace=self.trace,
            request_id=self.request_id,
            reply_id=self.reply_id,
            task=self.task,
            endpoint=self.endpoint,
            entity=self.entity,
            model=self.model,
            adapter=self.adapter,
            labels=self.labels,
            stream=self.stream,
            status=status,
            error=error,
            finish_reason=self.finish_reason,
            start_ns=start,
            first_ns=None if self.ttft is None else start + int(self.ttft * 1e9),
            end_ns=end,
            prompt_tokens=counts["prompt"] if self.task else None,
            cached_tokens=counts["cached"],
            completion_tokens=counts["completion"],
            costs=self._costs(),
            body=self.body,
            replies=None if self.replies is None else shown,
        )


def _shortened(choice: Choice) -> Choice:
    """Return ``choice`` with each text cut to the length that a span carries."""
    calls = [replace(call, arguments=call.arguments[:MAX_CONTENT]) for call in choice.calls]
    return replace(choice, text=choice.text[:MAX_CONTENT], reasoning=choice.reasoning[:MAX_CONTENT], calls=tuple(calls))
