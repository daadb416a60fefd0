"""One rule says where a sequence ends, for the engine, its doubles, recovery and the text above."""

from __future__ import annotations

import pytest

from mlflow_llm.serving.interface.request import Sampling
from mlflow_llm.serving.interface.stop_rule import StopRule


def rule(room: int | None = None, **more: int) -> StopRule:
    return StopRule(Sampling(**{"max_tokens": 5, "stop_token_ids": (7, 8), **more}), room)


@pytest.mark.parametrize(("last", "count", "reason"), [(1, 1, None), (7, 1, "stop"), (8, 5, "stop"), (1, 5, "length")])
def test_a_stop_token_wins_over_the_length(last: int, count: int, reason: str | None) -> None:
    """A stop token as the last token ends the text, even at full length."""
    assert rule().reason(last, count) == reason


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_stop_token_counts_after_min_tokens(count: int) -> None:
    """A stop token counts only after the first ``min_tokens`` tokens, for which the sampler excludes it."""
    found = rule(min_tokens=2)
    assert found.may_stop(count) == found.is_stop(7, count) == (count > 2)
    assert found.reason(7, count) == ("stop" if count > 2 else None)


def test_a_stop_string_counts_from_min_tokens_on() -> None:
    """A stop string may end with the ``min_tokens``-th token, since unlike a stop token it is part of the text."""
    assert [rule(min_tokens=2).may_match(count) for count in (1, 2, 3)] == [False, True, True]


def test_the_length_is_bounded_by_the_room() -> None:
    """The length is bounded by the room left in the context; a prompt that fills it ends at once."""
    assert [rule(room=3).reason(1, count) for count in (2, 3)] == [None, "length"]
    assert [rule(room=9).max_tokens, rule(room=0).reason(None, 0)] == [5, "length"]
