"""One request as the log and the metrics see it: who, what, when, how much, how it ended."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field

from ..reply import Delta, Done, Ended, Piece, Usage, Vector
from . import logs, metrics

_CALLERS_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_from(header: str | None) -> str:
    """The caller's own ``X-Request-Id`` where it is short and plain, else a new one."""
    return header if header and _CALLERS_ID.fullmatch(header) else f"req-{uuid.uuid4().hex}"


@dataclass(slots=True, kw_only=True)
class Exchange:
    """Times are seconds on the monotonic clock. ``finish`` records the exchange; a second call does nothing.

    ``headers`` are those that a successful answer gets beside the dialect's own.
    """

    request_id: str
    method: str
    path: str
    endpoint: str = ""
    adapter: str = ""
    task: str = ""
    stream: bool = False
    traceparent: str | None = None
    key: str | None = None
    started: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None
    delivered: int = 0
    usage: Usage | None = None
    finish_reason: str | None = None
    finished: bool = False
    headers: dict[str, str] = field(default_factory=dict)

    def see(self, piece: Piece) -> None:
        """Take note of a piece on its way to the caller."""
        if isinstance(piece, Delta | Vector):
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.delivered += piece.num_tokens if isinstance(piece, Delta) else 0
        elif isinstance(piece, Ended):
            self.finish_reason = piece.finish_reason
        elif isinstance(piece, Done):
            self.usage = piece.usage

    def finish(self, status: int, error: str | None = None) -> None:
        if self.finished:
            return
        self.finished = True
        seconds = time.perf_counter() - self.started
        if self.endpoint:
            self._measure(status, seconds)
        logs.event(
            "request",
            request_id=self.request_id,
            method=self.method,
            path=self.path,
            status=status,
            endpoint=self.endpoint or None,
            adapter=self.adapter or None,
            key=self.key,
            task=self.task or None,
            stream=self.stream or None,
            prompt_tokens=self.usage.prompt_tokens if self.usage else None,
            completion_tokens=self.usage.completion_tokens if self.usage else (self.delivered or None),
            finish_reason=self.finish_reason,
            ttft_ms=None if self.first is None else round((self.first - self.started) * 1e3, 3),
            duration_ms=round(seconds * 1e3, 3),
            error=error,
            traceparent=self.traceparent,
        )

    def _measure(self, status: int, seconds: float) -> None:
        labels = (self.endpoint, self.adapter)
        metrics.REQUESTS.labels(*labels, self.task, str(status)).inc()
        metrics.E2E.labels(*labels).observe(seconds)
        if status == 499:
            metrics.DISCONNECTS.labels(*labels).inc()
        if self.first is not None:
            metrics.TTFT.labels(*labels).observe(self.first - self.started)
            if self.last is not None and self.delivered > 1:
                metrics.TPOT.labels(*labels).observe((self.last - self.first) / (self.delivered - 1))
        if self.usage is not None:
            counts = {
                "prompt": self.usage.prompt_tokens,
                "cached": self.usage.cached_tokens,
                "completion": self.usage.completion_tokens,
            }
            for kind, count in counts.items():
                metrics.TOKENS.labels(*labels, kind).inc(count)
        elif self.delivered:
            metrics.TOKENS.labels(*labels, "completion").inc(self.delivered)
