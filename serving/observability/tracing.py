"""Traces: which requests are traced, with which ids, and how finished spans get to the exporter.

A request with a W3C ``traceparent`` continues its caller's trace. With tracing on, the share ``sample`` of the other
requests begin new traces. A worker only fills in a ``SpanRecord`` and hands it to ZeroMQ without waiting; the export to
MLflow and OpenTelemetry happens in a separate process (``trace_exporter``), because a trace costs tens of milliseconds
of CPU time. Records that the exporter cannot take are dropped and counted, never waited for.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq
from msgspec import Struct

from ..interface.labels import NONE, Labels
from ..interface.reply import Choice
from ..model_files.model_version import UNKNOWN, ModelVersion
from . import metrics

SOCKET = "traces.sock"
MAX_QUEUED = 1000  # records in the worker's queue, and as many in the exporter's
MAX_STATE = 512  # characters; W3C requires that at least so many are propagated
MAX_CONTENT = 64 * 2**10  # bytes of a body and characters of a reply that a span carries
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceContext(NamedTuple):
    """The ids of a request in its trace, in lower-case hex: 32 digits for the trace, 16 for a span.

    ``parent_id`` is the caller's span, ``state`` the caller's ``tracestate``."""

    trace_id: str
    span_id: str
    parent_id: str | None
    sampled: bool
    state: str = ""


class SpanRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A finished request. Times are nanoseconds since the epoch.

    ``body`` and ``replies`` are present if content is traced: the request as received, and (choice, finish reason) of
    each choice; the reason is None if the choice was cut off. ``costs`` are those of prompt and completion in
    micro-units, if tokens have a price."""

    trace: TraceContext
    request_id: str
    reply_id: str = ""
    task: str
    endpoint: str
    entity: str = ""
    model: ModelVersion = UNKNOWN
    adapter: str = ""
    labels: Labels = NONE
    stream: bool = False
    status: int
    error: str | None = None
    finish_reason: str | None = None
    start_ns: int
    first_ns: int | None = None
    end_ns: int
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0
    costs: tuple[int, int] | None = None
    body: bytes | None = None
    replies: list[tuple[Choice, str | None]] | None = None


def parse(traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
    """Return the caller's trace with a new span id, or None without a valid header (as the W3C recommendation
    requires)."""
    found = _TRACEPARENT.fullmatch(traceparent.strip()) if traceparent and len(traceparent) < 200 else None
    if found is None:
        return None
    version, trace_id, parent_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(parent_id, 16):
        return None
    state = tracestate if tracestate and len(tracestate) <= MAX_STATE else ""
    return TraceContext(trace_id, os.urandom(8).hex(), parent_id, bool(int(flags, 16) & 1), state)


def begin(*, sampled: bool) -> TraceContext:
    """Return the ids of a new trace."""
    return TraceContext(os.urandom(16).hex(), os.urandom(8).hex(), None, sampled)


class Tracer:
    """The part that decides which requests are traced, and sends their records. There is one per worker.

    ``sample`` is the share of requests that are traced if their caller does not decide. 0 traces none at all; a
    caller's ids then appear only in the log. ``send`` takes a record's bytes; it returns False if it drops them, and
    must not wait."""

    def __init__(
        self, sample: float = 0.0, *, content: bool = False, send: Callable[[bytes], bool] | None = None
    ) -> None:
        self.sample = sample if send is not None else 0.0
        self.content = content
        self._send = send
        self._encoder = msgspec.msgpack.Encoder()

    def context(self, traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
        """Return the ids of a request, or None if it has none."""
        found = parse(traceparent, tracestate)
        if self.sample == 0:
            return found._replace(sampled=False) if found else None
        if found is not None:
            return found
        if random.random() >= self.sample:
            return None
        return begin(sampled=True)

    def export(self, record: SpanRecord) -> None:
        if self._send is not None and not self._send(self._encoder.encode(record)):
            metrics.TRACES_DROPPED.inc()


OFF = Tracer()


class Outbox:
    """The sender of a ``Tracer``'s records to the exporter of the server in ``directory``. Create it in the worker,
    after the fork."""

    def __init__(self, directory: Path) -> None:
        self._socket: Any = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        self._socket.connect(f"ipc://{directory / SOCKET}")

    def __call__(self, record: bytes) -> bool:
        try:
            self._socket.send(record, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Close the socket; queued records have one more second to be sent."""
        self._socket.close(1000)
