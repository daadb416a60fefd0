"""Pauses between tries."""

from __future__ import annotations

import pytest

from mlflow_llm.serving.system.backoff import Backoff


@pytest.mark.parametrize("at_once", [False, True])
def test_pauses_double_up_to_the_longest(at_once: bool) -> None:
    """Pauses double up to the maximum, stay finite after thousands of failures, and the first is zero on request."""
    backoff = Backoff(0.25, 30.0, at_once=at_once)
    expected = [0.0] * at_once + [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert [backoff.failed() for _ in expected] == expected
    for _ in range(5000):
        backoff.failed()
    assert backoff.pause == 30.0


@pytest.mark.parametrize("at_once", [False, True])
def test_pauses_start_over_after_a_success(at_once: bool) -> None:
    """After a success the pauses start over, with an immediate attempt if ``at_once`` is set."""
    backoff = Backoff(1.0, 8.0)
    for _ in range(3):
        backoff.failed()
    backoff.succeeded(at_once=at_once)
    assert [backoff.failed() for _ in range(3)] == ([0.0, 1.0, 2.0] if at_once else [1.0, 2.0, 4.0])


def test_jitter_stays_in_its_range_and_does_not_add_up() -> None:
    """Each pause is drawn around the one without jitter, so that those who failed together come back apart."""
    one, two = (Backoff(1.0, 8.0, jitter=(0.5, 1.5)) for _ in range(2))
    pauses = [(one.failed(), two.failed()) for _ in range(20)]
    for pause, (first, second) in zip([1.0, 2.0, 4.0, *[8.0] * 17], pauses, strict=True):
        assert 0.5 * pause <= first <= 1.5 * pause
        assert 0.5 * pause <= second <= 1.5 * pause
    assert any(first != second for first, second in pauses)
