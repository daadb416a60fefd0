"""The time budget of best-effort work beside provisioned requests, from a cost model that is fitted as steps run.

A provisioned request (``ValidRequest.provisioned``) keeps its time per output token whatever else the engine has to do.
The time of a step is therefore predicted from its load, and best-effort work may only add a small part of what the
provisioned work takes alone: a share of it on average (``Pace``), which preserves the provisioned tokens/s, and
``STEP_SHARE`` in any one step, which bounds the longest pauses. The budget is charged with the measured time of
best-effort work, never with the prediction, so a wrong estimate costs a few steps, not the provisioned throughput.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

STEP_SHARE = 0.16  # of the time of any one step that is kept: pauses between tokens stay at 1.16 times what they were
PROBE_STEPS = 4  # one in so many provisioned steps has no best-effort work, to measure what they take alone
MIN_SEEN = 8  # steps before an estimate is worth anything

_WINDOW_STEPS = 256  # steps that an estimate is made from
_FADE_FACTOR = 0.98  # the weight of a step relative to the one after it
_REFIT_STEPS = 4  # steps from one estimate to the next
_SCALE = np.array([1.0, 8.0, 64.0, 1.0, 2048.0])  # brings all features to about one
_RIDGE_WEIGHT = 1e-4
_MAX_DEBT_CEILINGS = (
    10.0  # the most that best-effort work may owe, in ceilings; it pays back what it overdrew before it runs
)
_OUTLIER_FACTOR = 3.0  # times the estimate; a longer step is put down to another process

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace that guarded work keeps: of its time, others may add ``share`` on average.

    For ``linger_seconds`` of steps after it, its callers' next requests are expected, so steps stay short: their work
    takes at most as long as ``linger_steps`` of one sequence.
    """

    share: float
    linger_seconds: float
    linger_steps: float


PROVISIONED_PACE = Pace(share=0.06, linger_seconds=0.5, linger_steps=2.0)  # tokens/s stay at 94 %
STANDARD_PACE = Pace(share=0.03, linger_seconds=10.0, linger_steps=0.25)  # beside batches: people pause longer


class RunExtent(Protocol):
    """The extent of a run, which decides its cost: ``num_tokens`` of a sequence from ``start``."""

    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The factors that determine the time of a step. ``rows`` counts chunks of one token (decode), ``chunks`` longer
    ones (prefill), ``chunk_tokens`` their tokens, and ``context`` the tokens whose keys and values are read."""

    rows: int = 0
    chunk_tokens: int = 0
    chunks: int = 0
    context: int = 0

    @classmethod
    def of(cls, runs: Iterable[RunExtent]) -> StepLoad:
        """Return the load of a step made of ``runs``."""
        rows = chunk_tokens = chunks = context = 0
        for run in runs:
            context += run.start + run.num_tokens
            if run.num_tokens == 1:
                rows += 1
            else:
                chunks += 1
                chunk_tokens += run.num_tokens
        return cls(rows, chunk_tokens, chunks, context)

    def __bool__(self) -> bool:
        return bool(self.rows or self.chunks)

    @property
    def features(self) -> Vector:
        """A vector [5] scaled to about one: a constant, then the fields in order."""
        return np.array([1.0, self.rows, self.chunk_tokens, self.chunks, self.context]) / _SCALE


class StepCost:
    """A predictor of the seconds of a step, linearly from its features.

    The fit is a weighted ridge regression over the last ``_WINDOW_STEPS`` with non-negative coefficients (Lawson and
    Hanson's active set, only ever removing features). The true cost is not linear, but it nearly is around the steps
    that run now, and old steps fade.
    """

    def __init__(self) -> None:
        self._features = np.zeros((_WINDOW_STEPS, len(_SCALE)))
        self._seconds = np.zeros(_WINDOW_STEPS)
        self._count = 0
        self._weights: Vector = np.zeros(len(_SCALE))

    @property
    def known(self) -> bool:
        """Return whether enough steps have been seen for an estimate."""
        return self._count >= MIN_SEEN

    def observe(self, work: StepLoad, seconds: float) -> None:
        """Learn from a step of ``work`` that took ``seconds``. Outliers, which other processes cause, are capped."""
        features = work.features
        if self.known and (foreseen := float(self._weights @ features)) > 0:
            seconds = min(seconds, _OUTLIER_FACTOR * foreseen)
        at = self._count % _WINDOW_STEPS
        self._features[at], self._seconds[at] = features, seconds
        self._count += 1
        if self._count % _REFIT_STEPS == 0:
            self._fit()

    def predict(self, work: StepLoad) -> float:
        """Return the seconds of a step of ``work``; 0 for an empty one."""
        return float(self._weights @ work.features) if work else 0.0

    def row(self, context: int) -> float:
        """Return the seconds that one more sequence with one token adds."""
        return float(self._weights[1] / _SCALE[1] + self._weights[4] * context / _SCALE[4])

    def chunk(self, start: int, num_tokens: int) -> float:
        """Return the seconds that one more run of several tokens adds."""
        w = self._weights / _SCALE
        return float(w[3] + w[2] * num_tokens + w[4] * (start + num_tokens))

    def _fit(self) -> None:
        n = min(self._count, _WINDOW_STEPS)
        age = (self._count - 1 - np.arange(n)) % _WINDOW_STEPS
        weight = _FADE_FACTOR ** age.astype(np.float64)
        x, y = self._features[:n], self._seconds[:n]
        gram = (x * weight[:, None]).T @ x / weight.sum()
        target = (x * weight[:, None]).T @ y / weight.sum()
        kept = list(range(len(_SCALE)))
        while kept:  # leave out a feature with a negative coefficient: it explains nothing
            part = gram[np.ix_(kept, kept)] + _RIDGE_WEIGHT * np.eye(len(kept))
            found = np.linalg.solve(part, target[kept])
            if found.min() >= 0:
                break
            del kept[int(found.argmin())]
        self._weights = np.zeros(len(_SCALE))
        if kept:
            self._weights[kept] = found


class BestEffortBudget:
    """The account of the seconds that best-effort work may still take. Call ``record_step_time`` after every step."""

    def __init__(self) -> None:
        self.cost = StepCost()
        self.credit = 0.0  # seconds
        self._pace = PROVISIONED_PACE  # of the last guarded step
        self._since_provisioned = PROVISIONED_PACE.linger_seconds
        self._steps = 0
        self._guarded_seen = 0

    @property
    def lingers(self) -> bool:
        """Return whether a guarded request ended so recently that its caller's next one may come at any moment."""
        return self._since_provisioned < self._pace.linger_seconds

    def allowance(self, provisioned: StepLoad) -> float:
        """Return the seconds that best-effort work may add to a step of ``provisioned``."""
        if not self.cost.known:
            return 0.0
        if not provisioned:
            return self._pace.linger_steps * self.cost.predict(StepLoad(rows=1))
        if self._steps % PROBE_STEPS == 0:
            return 0.0
        maximum = STEP_SHARE * self.cost.predict(provisioned)
        if self.credit >= self._piece:  # enough was saved for the smallest piece, even if it exceeds a step's share
            maximum = max(maximum, self._piece)
        return min(self.credit, maximum)

    @property
    def _piece(self) -> float:
        """Seconds of the least work that can be added: one token of one sequence."""
        return self.cost.row(0) * 1.5

    def _ceiling(self, maximum: float) -> float:
        return 2 * max(maximum, self._piece)

    def row(self, provisioned: StepLoad, context: int) -> float:
        """Return the seconds charged for one more decoding row; never 0, since an estimate of 0 would admit
        everything."""
        return max(self.cost.row(context), self.cost.predict(provisioned or StepLoad(rows=1)) / 100)

    def chunk_tokens(self, provisioned: StepLoad, start: int, seconds: float) -> int:
        """Return how many prefill tokens of a prompt, from ``start``, fit into ``seconds``."""
        fixed = self.cost.chunk(start, 0)
        token = max(self.cost.chunk(start, 1) - fixed, self.cost.predict(provisioned or StepLoad(rows=1)) / 400)
        # prefill of n tokens of one sequence never costs more than one token of n sequences
        return max(int((seconds - fixed) / max(token, 1e-9)), int(seconds / max(self.row(provisioned, start), 1e-9)))

    def expect_more(self, pace: Pace) -> None:
        """Expect further requests of guarded work that ran just now and keeps ``pace``."""
        self._pace = pace
        self._since_provisioned = 0.0

    def record_step_time(
        self, provisioned: StepLoad, total: StepLoad, seconds: float, *, pace: Pace = PROVISIONED_PACE
    ) -> None:
        """Book a step that took ``seconds``, with the load ``total``, of which ``provisioned`` was provisioned (or
        guarded in the same way) and keeps ``pace``."""
        if provisioned:
            self.expect_more(pace)
            self._steps += 1
            self._guarded_seen += 1
            if self.cost.known:
                self._account(provisioned, total, seconds)
        else:
            self._since_provisioned += seconds
        # Steps far larger than provisioned ones would distort the fit, and so would a long time of steps that are all
        # alike; they count only until there are enough others.
        recent = self._since_provisioned < PROVISIONED_PACE.linger_seconds
        if provisioned or recent or self._guarded_seen < MIN_SEEN:
            self.cost.observe(total, seconds)

    def _account(self, provisioned: StepLoad, total: StepLoad, seconds: float) -> None:
        alone = self.cost.predict(provisioned)
        self.credit += self._pace.share * alone
        if total != provisioned:
            foreseen = self.cost.predict(total) - alone
            taken = seconds - alone
            self.credit -= min(taken, _OUTLIER_FACTOR * foreseen + STEP_SHARE * alone)
        ceiling = self._ceiling(STEP_SHARE * alone)
        self.credit = max(-_MAX_DEBT_CEILINGS * ceiling, min(ceiling, self.credit))
