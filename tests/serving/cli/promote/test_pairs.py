"""Pairs of answers, and the numbers of feedbacks."""

from __future__ import annotations

import math
from typing import Any

import pytest
from mlflow.genai.judges import CategoricalRating

from mlflow_llm.serving.cli.promote.pairs import Outcome, Pair, outcome_of
from mlflow_llm.serving.cli.promote.scorers import number_of

CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("status", "body", "output", "error"),
    [
        (200, {"choices": [{"text": "a"}, {"text": "b"}]}, "a", ""),
        (200, {"choices": [{"message": {"content": "a"}}]}, "a", ""),
        (200, {"choices": [{"message": {"content": ""}}]}, "", ""),
        (200, {"choices": [{"message": CALL}]}, CALL, ""),
        (200, {"choices": []}, None, ""),
        (400, {"error": {"message": "no"}}, None, "no"),
        (500, {"message": "no"}, None, "no"),
    ],
)
def test_the_output_of_a_reply(status: int, body: dict[str, Any], output: Any, error: str) -> None:
    """Scorers get the text of the first choice, an empty one too, or the message that calls tools."""
    found = outcome_of(status, body)
    assert (found.status, found.output, found.error, found.is_answer) == (status, output, error, output is not None)


@pytest.mark.parametrize(("status", "failed"), [(200, False), (400, True), (500, True), (429, False), (503, False)])
def test_a_failure_of_the_candidate(status: int, failed: bool) -> None:
    """An answer that only the current version gave is the candidate's failure, unless its engine was busy or away."""
    answer, other = Outcome(status=200, output="a"), Outcome(status=status, output="b" if status == 200 else None)
    pair = Pair(name="line 1", inputs={}, current=answer, candidate=other)
    assert (pair.is_complete, pair.is_failure) == (status == 200, failed)
    assert not Pair(name="line 1", inputs={}, current=other, candidate=answer).is_failure


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0),
        (False, 0.0),
        (0.25, 0.25),
        (3, 3.0),
        ("yes", 1.0),
        ("No", 0.0),
        (CategoricalRating.YES, 1.0),
        ("maybe", None),
        (math.nan, None),
        (math.inf, None),
        (None, None),
        ({"a": 1}, None),
    ],
)
def test_the_number_of_a_feedback(value: Any, number: float | None) -> None:
    """Numbers, truth values and ratings are scores; what is none is not guessed."""
    assert number_of(value) == number
