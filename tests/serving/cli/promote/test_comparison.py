"""The comparison of paired scores, and the decision that follows from it."""

from __future__ import annotations

import numpy as np
import pytest

from mlflow_llm.serving.cli.promote.comparison import compare, decide


def test_differences_are_paired() -> None:
    """The standard error is that of the differences, not of the scores, which vary more; the bound lies below."""
    draw = np.random.default_rng(1)
    before = draw.normal(0, 1, 200)
    after = before + draw.normal(0.1, 0.2, 200)
    found = compare(before.tolist(), after.tolist(), 0.95)
    differences = after - before
    assert found.difference == pytest.approx(differences.mean())
    assert found.standard_error == pytest.approx(differences.std(ddof=1) / np.sqrt(200))
    assert found.standard_error < before.std() / np.sqrt(200) / 3
    normal = found.difference - 1.645 * found.standard_error
    assert found.lower_bound == pytest.approx(normal, abs=found.standard_error / 4)
    assert found.wins + found.losses == found.pairs == 200
    assert compare(before.tolist(), after.tolist(), 0.95) == found


@pytest.mark.parametrize(
    ("after", "margin", "needs_bound", "failures", "better", "reason"),
    [
        ([1.0, 1.0, 1.0, 1.0], 1.0, True, 0, True, "at least the margin of 1"),
        ([1.0, 1.0, 1.0, 0.0], 0.8, False, 0, False, "below the margin of 0.8"),
        ([9.0, -1.0, -1.0, -1.0], 0.5, False, 0, True, "at least the margin of 0.5"),
        ([9.0, -1.0, -1.0, -1.0], 0.5, True, 0, False, "not above 0"),
        ([1.0, 1.0, 1.0, 1.0], 0.1, False, 2, False, "failed at 2 requests"),
        ([0.1, 0.1, 0.1, 0.1], 0.1, False, 0, True, "at least the margin of 0.1"),
    ],
)
def test_what_is_better(
    after: list[float], margin: float, needs_bound: bool, failures: int, better: bool, reason: str
) -> None:
    """A version is better by the margin, where asked only with its bound above 0, and never if it failed."""
    found = decide(compare([0.0] * 4, after), margin, needs_bound=needs_bound, failures=failures)
    assert (found.is_better, reason in found.reason) == (better, True), found.reason
