"""The choice of traced requests, their trace ids and their log fields."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from flask.testing import FlaskClient

from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.observability import metrics
from mlflow_llm.serving.observability.tracing import Tracer, parse
from mlflow_llm.serving.system import logs

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{PARENT}-01"
CHAT = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "temperature": 0}


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "x" * 300,
        f"00-{TRACE}-{PARENT}",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE[:-1]}-{PARENT}-01",
    ],
)
def test_invalid_traceparent_headers_are_ignored(header: str | None) -> None:
    """A header that the recommendation calls invalid counts as none."""
    assert parse(header) is None


def test_a_header_is_continued() -> None:
    """The caller's trace id and span id are taken over, the span id is ours, the flag decides on sampling."""
    found = parse(HEADER)
    assert found is not None
    assert (found.trace_id, found.parent_id, found.sampled) == (TRACE, PARENT, True)
    assert re.fullmatch("[0-9a-f]{16}", found.span_id)
    assert found.span_id != PARENT
    later = parse(f"01-{TRACE}-{PARENT}-00-more")  # a version of the future may say more
    assert later is not None
    assert not later.sampled


def test_the_callers_state_goes_on() -> None:
    """``tracestate`` is carried with the context, as the recommendation asks, up to its 512 characters."""
    found = Tracer(1.0, send=[].append).context(HEADER, "vendor=a,other=b")
    assert found is not None
    assert found.state == "vendor=a,other=b"
    longest = parse(HEADER, "v=" + "a" * 511)
    assert longest is not None
    assert longest.state == ""


def test_sampling_is_the_callers_or_the_servers_share() -> None:
    """Sampling is off by default; if it is on the caller's flag decides, or else the configured share."""
    assert Tracer().context(None) is None
    off = Tracer().context(HEADER)
    assert off is not None
    assert not off.sampled
    send = [].append
    always, never = Tracer(1.0, send=send), Tracer(1e-12, send=send)
    assert always.context(None).sampled
    assert not always.context(HEADER[:-2] + "00").sampled
    assert never.context(None) is None
    assert never.context(HEADER).sampled
    half = Tracer(0.5, send=send)
    assert 350 < sum(half.context(None) is not None for _ in range(1000)) < 650


def test_the_log_has_the_ids(client: FlaskClient, caplog: pytest.LogCaptureFixture) -> None:
    """A request's log line carries its own id, its reply's id and the caller's trace, also with tracing off."""
    log = logs.logger()
    log.addHandler(caplog.handler)
    try:
        log.setLevel("INFO")
        answer = client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": HEADER, "X-Request-Id": "a-1"})
    finally:
        log.removeHandler(caplog.handler)
    fields = next(r.fields for r in caplog.records if r.getMessage() == "request")
    assert (fields["request_id"], fields["trace_id"], fields["parent_id"]) == ("a-1", TRACE, PARENT)
    assert answer.json["id"] == f"chatcmpl-{fields['reply_id']}"
    assert "span_id" not in fields


def test_a_far_behind_exporter_costs_traces_and_nothing_else(make: Callable[..., WorkerState]) -> None:
    """Records that cannot be sent are dropped and counted; the request is answered."""
    server = make(tracer=Tracer(1.0, send=lambda record: False))

    def dropped() -> float:
        (family,) = metrics.TRACES_DROPPED.collect()
        return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))

    before = dropped()
    assert create_app(server).test_client().post("/v1/chat/completions", json=CHAT).status_code == 200
    assert dropped() == before + 1
