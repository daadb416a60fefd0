"""Numbers of engines, as they are read from an exposition that prometheus_client has written, and rates between two."""

from __future__ import annotations

import os

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from pseudo_terminal import Terminal
from serving_process import Running

from mlflow_llm.serving.cli.endpoints.exposition import engine_numbers
from mlflow_llm.serving.cli.endpoints.server_state import Sample

PLACE = ('a"b\\c', "m")
LABELS = ("endpoint", "entity")


def exposition(**counts: float) -> str:
    """Return the metrics of one engine in the server's own format."""
    registry = CollectorRegistry()
    for name in ("kv_tokens_used", "kv_tokens_total", "replicas"):
        Gauge(f"mlflow_llm_{name}", name, LABELS, registry=registry).labels(*PLACE).set(counts.get(name, 0))
    generated = Counter("mlflow_llm_generated_tokens", "generated", LABELS, registry=registry)
    generated.labels(*PLACE).inc(counts.get("generated", 0))
    tokens = Counter("mlflow_llm_tokens", "tokens", (*LABELS, "adapter", "kind"), registry=registry)
    for kind in ("prompt", "cached", "completion"):
        tokens.labels(*PLACE, "pirate", kind).inc(counts.get(kind, 0))
    Counter("mlflow_llm_store_outages", "outages", registry=registry).inc()
    return generate_latest(registry).decode()


def test_numbers_are_read_by_endpoint_and_entity() -> None:
    """A gauge whose name ends in total, counters, and labels with escaped characters are read as they were written."""
    found = engine_numbers(exposition(kv_tokens_total=64, replicas=2, generated=7, prompt=5, cached=2, completion=3))
    assert list(found) == [PLACE]
    assert [found[PLACE][name] for name in ("kv_tokens_total", "replicas", "generated_tokens")] == [64, 2, 7]
    assert found[PLACE].tokens["pirate", "completion"] == 3
    assert found[PLACE].prompt_tokens() == 3


def test_rates_are_those_between_two_samples() -> None:
    """Rates are differences over the time between; a counter that began again gives 0, a missing engine None."""
    first = Sample(at=10.0, engines=engine_numbers(exposition(generated=10, prompt=10, cached=4)))
    second = Sample(at=12.0, engines=engine_numbers(exposition(generated=30, prompt=22, cached=6)))
    assert (second.rate(first, PLACE), second.prefill_rate(first, PLACE)) == (10.0, 5.0)
    assert Sample(at=14.0, engines=first.engines).rate(second, PLACE) == 0.0
    assert second.rate(Sample(at=11.0), PLACE) is None
    assert second.rate(second, PLACE) is None


def test_a_text_that_is_no_exposition() -> None:
    """A line of ours that is no sample is refused."""
    with pytest.raises(ValueError, match="is not a sample"):
        engine_numbers("mlflow_llm_replicas{")


def test_top_is_live_in_a_terminal(observed: Running) -> None:
    """In a terminal top draws again and again on a screen of its own, and Ctrl-C gives the first one back."""
    screen = Terminal(["top", "--url", observed.url, "--interval", "0.1"], dict(os.environ))
    try:
        screen.read_until("\x1b[?1049h")
        for _ in range(3):
            screen.read_until("Ctrl-C ends")
            screen.read_until("assistant")
        screen.read_until("open requests by tenant: not known: 404: this server keeps no ledger")
        screen.type("\x03")
        screen.read_until("\x1b[?1049l")
        assert screen.wait() == 0
    finally:
        screen.close()
