"""Turns of callers: one of them never holds all places of a pool."""

from __future__ import annotations

import time

import pytest

from mlflow_llm.serving.sandbox import NoProcess
from mlflow_llm.serving.sandbox.pool import Turns


def test_a_caller_has_one_place_at_a_time() -> None:
    """A second piece of work of the same caller waits for the first; another caller's, and nobody's, do not."""
    turns = Turns()
    past = time.monotonic()
    with turns.hold("a", past):
        with pytest.raises(NoProcess), turns.hold("a", past):
            pass
        with turns.hold("b", past), turns.hold("", past), turns.hold("", past):
            assert sorted(turns._places) == ["a", "b"]
    with turns.hold("a", past):
        pass
    assert turns._places == {}
