"""The time for which an engine goes on after it was asked to end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mlflow_llm.serving.transport.engine_process import drain
from mlflow_llm.serving.transport.engine_process.drain import Drain


@pytest.fixture
def clock(monkeypatch):
    """Return a clock whose time is ``clock[0]``."""
    now = [100.0]
    monkeypatch.setattr(drain, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_nobody_asked(clock):
    """An engine that was not asked to end goes on, with work or without."""
    asked = Drain(5.0)
    clock[0] += 1000
    assert not asked.under_way
    assert not asked.over(busy=False)


def test_what_runs_has_its_time(clock):
    """A drain is over at once without work and after its seconds with work; asking again does not extend it."""
    asked = Drain(5.0)
    asked.begin()
    assert asked.over(busy=False)
    clock[0] += 4
    asked.begin()
    assert not asked.over(busy=True)
    assert asked.under_way
    clock[0] += 1
    assert asked.over(busy=True)
    assert not asked.under_way


def test_at_once(clock):
    """An engine asked to end at once does not wait, even if it is draining."""
    for before in (False, True):
        asked = Drain(5.0)
        if before:
            asked.begin()
        asked.begin(at_once=True)
        assert asked.over(busy=True)
