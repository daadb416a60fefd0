"""The comparison of two versions by their scores at the same requests, and whether the candidate is better.

The scores are paired: a request that is hard for one version is so for the other, and the differences of pairs vary
less than the scores do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 2000
SEED = 0  # the same scores make the same decision
DEFAULT_CONFIDENCE = 0.95  # of the bound that is reported where none is asked for
ROUNDING_ERROR = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Means of the scores, the mean difference with its standard error, and the bound above which it lies with the
    probability ``confidence``, by a bootstrap over the pairs."""

    pairs: int
    current: float
    candidate: float
    difference: float
    standard_error: float
    lower_bound: float
    confidence: float
    wins: int
    losses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether the candidate is better, and why."""

    is_better: bool
    reason: str


def compare(current: list[float], candidate: list[float], confidence: float = DEFAULT_CONFIDENCE) -> Comparison:
    """Compare scores of the same requests, at least two, in the same order."""
    before, after = np.asarray(current, float), np.asarray(candidate, float)
    differences = after - before
    count = len(differences)
    draw = np.random.default_rng(SEED)
    means = [differences[draw.integers(count, size=count)].mean() for _ in range(NUM_RESAMPLES)]
    return Comparison(
        pairs=count,
        current=float(before.mean()),
        candidate=float(after.mean()),
        difference=float(differences.mean()),
        standard_error=float(differences.std(ddof=1) / np.sqrt(count)),
        lower_bound=float(np.quantile(means, 1 - confidence)),
        confidence=confidence,
        wins=int((differences > 0).sum()),
        losses=int((differences < 0).sum()),
    )


def decide(found: Comparison, margin: float, *, needs_bound: bool, failures: int) -> Decision:
    """Decide whether the candidate is better by ``margin``; with ``needs_bound``, also whether the bound is above 0.

    ``failures`` are the requests at which the candidate failed and the current version did not: with any, it is not.
    """
    said = (
        f"{found.candidate:.4g} against {found.current:.4g} over {found.pairs} requests, a difference of "
        f"{found.difference:+.4g} ± {found.standard_error:.2g}"
    )
    if failures:
        return Decision(
            is_better=False,
            reason=f"the candidate failed at {failures} requests that the current version answered ({said})",
        )
    if found.difference < margin - ROUNDING_ERROR:
        return Decision(is_better=False, reason=f"{said}, below the margin of {margin:g}")
    if needs_bound and found.lower_bound <= ROUNDING_ERROR:
        bound = f"its lower bound at {found.confidence:g} is {found.lower_bound:+.4g}, not above 0"
        return Decision(is_better=False, reason=f"{said}; {bound}")
    return Decision(is_better=True, reason=f"{said}, at least the margin of {margin:g}")
