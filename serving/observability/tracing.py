"""Traces: which requests are traced, under which ids, and their finished spans on the way to the exporter.

A request with a W3C ``traceparent`` goes on in its caller's trace. With tracing on, one in ``sample`` of the others
begins a trace of its own. A worker only fills in a ``SpanRecord`` and hands it to ZeroMQ without waiting; what MLflow
and OpenTelemetry make of it happens in a process of its own (``trace_exporter``), because a trace costs tens of
milliseconds of processor time. Records that the exporter cannot take are dropped and counted, never waited for.
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

from ..reply import Choice
from . import metrics

SOCKET = "traces.sock"
MAX_QUEUED = 1000  # records in the worker's queue, and again in the exporter's
MAX_STATE = 512  # characters, which W3C asks to carry at least
MAX_CONTENT = 64 * 2**10  # bytes of a body, characters of a reply that a span carries
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceContext(NamedTuple):
    """Ids in lower-case hex: 32 digits the trace's, 16 a span's. ``parent_id`` is the caller's span, ``state`` its
    ``tracestate``."""

    trace_id: str
    span_id: str
    parent_id: str | None
    sampled: bool
    state: str = ""


class SpanRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A finished request. Times are nanoseconds since the epoch. ``body`` and ``replies`` are there where content is
    traced: the request as it came, and (choice, finish reason) of each, None where it was broken
    off."""

    trace: TraceContext
    request_id: str
    reply_id: str = ""
    task: str
    endpoint: str
    adapter: str = ""
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
    body: bytes | None = None
    replies: list[tuple[Choice, str | None]] | None = None


def parse(traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
    """The caller's trace with a new span id of ours; None without a valid header, as the W3C recommendation asks."""
    found = _TRACEPARENT.fullmatch(traceparent.strip()) if traceparent and len(traceparent) < 200 else None
    if found is None:
        return None
    version, trace_id, parent_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(parent_id, 16):
        return None
    state = tracestate if tracestate and len(tracestate) <= MAX_STATE else ""
    return TraceContext(trace_id, os.urandom(8).hex(), parent_id, bool(int(flags, 16) & 1), state)


class Tracer:
    """One a worker. ``sample`` is the share of requests traced when their caller says nothing; 0 traces none at all,
    and then a caller's ids are in the log and nowhere else. ``send`` takes a record's bytes; it may drop them (False)
    and must not wait."""

    def __init__(
        self, sample: float = 0.0, *, content: bool = False, send: Callable[[bytes], bool] | None = None
    ) -> None:
        self.sample = sample if send is not None else 0.0
        self.content = content
        self._send = send
        self._encoder = msgspec.msgpack.Encoder()

    def context(self, traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
        """The ids of a request; None where it has none."""
        found = parse(traceparent, tracestate)
        if self.sample == 0:
            return found._replace(sampled=False) if found else None
        if found is not None:
            return found
        if random.random() >= self.sample:
            return None
        return TraceContext(os.urandom(16).hex(), os.urandom(8).hex(), None, True)

    def export(self, record: SpanRecord) -> None:
        if self._send is not None and not self._send(self._encoder.encode(record)):
            metrics.TRACES_DROPPED.inc()


OFF = Tracer()


class Outbox:
    """A ``Tracer``'s way to the exporter of the server in ``directory``; to be made in the worker, after the fork."""

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
        """Records that are still here go on for a second."""
        self._socket.close(1000)
