"""Scorers of MLflow's for tests of guardrails."""

from __future__ import annotations

import time
from typing import Any

from mlflow.genai.scorers import scorer


@scorer
def polite(inputs: Any, outputs: Any) -> bool:
    """Let texts pass that have no "rude", whatever was asked."""
    assert isinstance(inputs, dict)
    return "rude" not in str(outputs)


@scorer
def nothing(outputs: Any) -> str:
    """Let no text pass."""
    print(outputs)  # which must not be read as an answer
    return "no"


@scorer
def broken(outputs: Any) -> bool:
    """Fail."""
    raise RuntimeError("a judge that is ill")


@scorer
def slow(outputs: Any) -> bool:
    """Take longer than anybody waits."""
    time.sleep(3600)
    return True


def plain(outputs: Any) -> bool:
    """Be no scorer of MLflow's."""
    return True
