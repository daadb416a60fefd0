"""Time budget of best-effort work beside provisioned requests, from a cost model of steps that is fitted as they run.

A provisioned request (``ValidRequest.provisioned``) keeps its time per output token whatever else the engine has to do.
So the time of a step is predicted from its load, and best-effort work joins a step only for a small part of what the
provisioned work alone takes: ``SHARE`` of it on average, which keeps the provisioned tokens/s, and ``STEP_SHARE`` in
any one step, which keeps their longest pauses. The budget is charged with the time that best-effort work was measured
to take, never with the prediction: a wrong estimate costs a few steps, not what was bought.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

SHARE = 0.06  # of provisioned time that best-effort work may add on average: tokens/s stay at 94 %
STEP_SHARE = 0.16  # and in any one step: pauses between tokens stay at 1.16 times what they were
LINGER = 0.5  # seconds of steps after the last provisioned one in which the next is expected: only short steps
LINGER_STEPS = 2.0  # how long such a step may take, in steps of one sequence
PROBE_EVERY = 4  # of the steps that could have best-effort work one has none: what provisioned work takes alone
MIN_SEEN = 8  # steps before an estimate is worth anything

_WINDOW = 256  # steps an estimate is made of,
_FADE = 0.98  # each of which weighs so much less than the one after it
_REFIT = 4  # steps from one estimate to the next
_SCALE = np.array([1.0, 8.0, 64.0, 1.0, 2048.0])  # brings all features to about one
_RIDGE = 1e-4
_DEBT = 10.0  # ceilings that best-effort work may owe: what it took beyond its budget is paid back first
_OUTLIER = 3.0  # times the estimate: more than that is another process's doing

Vector = npt.NDArray[np.float64]


class RunExtent(Protocol):
    """A run, as far as its cost goes: ``num_tokens`` of a sequence from ``start``."""

    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What decides the time of a step: ``rows`` are runs of one token (decode), ``chunks`` longer runs (prefill) with
    ``chunk_tokens`` in all; ``context`` counts the tokens whose keys and values are read."""

    rows: int = 0
    chunk_tokens: int = 0
    chunks: int = 0
    context: int = 0

    @classmethod
    def of(cls, runs: Iterable[RunExtent]) -> StepLoad:
        """The load of a step made of ``runs``."""
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
        """[5], scaled to about one: a constant, then the fields in order."""
        return np.array([1.0, self.rows, self.chunk_tokens, self.chunks, self.context]) / _SCALE


class StepCost:
    """Seconds of a step, linear in its features: weighted ridge regression over the last ``_WINDOW`` steps with
    non-negative coefficients (Lawson and Hanson's active set, one way).

    A step's true cost is not linear, but it is near the steps that run now, and old ones fade.
    """

    def __init__(self) -> None:
        self._features = np.zeros((_WINDOW, len(_SCALE)))
        self._seconds = np.zeros(_WINDOW)
        self._count = 0
        self._weights: Vector = np.zeros(len(_SCALE))

    @property
    def known(self) -> bool:
        """Whether enough steps were seen for an estimate."""
        return self._count >= MIN_SEEN

    def observe(self, work: StepLoad, seconds: float) -> None:
        """Learn from a step of ``work`` that took ``seconds``; outliers, which are the doing of other processes, are
        cut."""
        features = work.features
        if self.known and (foreseen := float(self._weights @ features)) > 0:
            seconds = min(seconds, _OUTLIER * foreseen)
        at = self._count % _WINDOW
        self._features[at], self._seconds[at] = features, seconds
        self._count += 1
        if self._count % _REFIT == 0:
            self._fit()

    def predict(self, work: StepLoad) -> float:
        """Seconds of a step of ``work``; 0 for an empty one."""
        return float(self._weights @ work.features) if work else 0.0

    def row(self, context: int) -> float:
        """Seconds that one more sequence with one token adds."""
        return float(self._weights[1] / _SCALE[1] + self._weights[4] * context / _SCALE[4])

    def chunk(self, start: int, num_tokens: int) -> float:
        """Seconds that one more run of several tokens adds."""
        w = self._weights / _SCALE
        return float(w[3] + w[2] * num_tokens + w[4] * (start + num_tokens))

    def _fit(self) -> None:
        n = min(self._count, _WINDOW)
        age = (self._count - 1 - np.arange(n)) % _WINDOW
        weight = _FADE ** age.astype(np.float64)
        x, y = self._features[:n], self._seconds[:n]
        gram = (x * weight[:, None]).T @ x / weight.sum()
        target = (x * weight[:, None]).T @ y / weight.sum()
        kept = list(range(len(_SCALE)))
        while kept:  # a negative coefficient says that its feature explains nothing: leave it out
            part = gram[np.ix_(kept, kept)] + _RIDGE * np.eye(len(kept))
            found = np.linalg.solve(part, target[kept])
            if found.min() >= 0:
                break
            del kept[int(found.argmin())]
        self._weights = np.zeros(len(_SCALE))
        if kept:
            self._weights[kept] = found


class BestEffortBudget:
    """Account of the seconds that best-effort work may still take. ``ran`` books every step; it owns no sequence."""

    def __init__(self) -> None:
        self.cost = StepCost()
        self.credit = 0.0  # seconds
        self._since_provisioned = LINGER
        self._steps = 0
        self._guarded_seen = 0

    @property
    def lingers(self) -> bool:
        """Whether a provisioned request ended just now, so that its caller's next one may come at any moment."""
        return self._since_provisioned < LINGER

    def allowance(self, provisioned: StepLoad) -> float:
        """Seconds that best-effort work may add to a step of ``provisioned``."""
        if not self.cost.known:
            return 0.0
        if not provisioned:
            return LINGER_STEPS * self.cost.predict(StepLoad(rows=1))
        if self._steps % PROBE_EVERY == 0:
            return 0.0
        most = STEP_SHARE * self.cost.predict(provisioned)
        if self.credit >= self._piece:  # saved up, if need be, for a piece that is larger than any step's part
            most = max(most, self._piece)
        return min(self.credit, most)

    @property
    def _piece(self) -> float:
        """The least that there is to run: one sequence's token."""
        return self.cost.row(0) * 1.5

    def _ceiling(self, most: float) -> float:
        return 2 * max(most, self._piece)

    def row(self, provisioned: StepLoad, context: int) -> float:
        """Seconds reckoned for one more decoding row; at least a little, lest an estimate of zero admit everything."""
        return max(self.cost.row(context), self.cost.predict(provisioned or StepLoad(rows=1)) / 100)

    def chunk_tokens(self, provisioned: StepLoad, start: int, seconds: float) -> int:
        """Prefill tokens of a prompt from ``start`` on that fit into ``seconds``."""
        fixed = self.cost.chunk(start, 0)
        token = max(self.cost.chunk(start, 1) - fixed, self.cost.predict(provisioned or StepLoad(rows=1)) / 400)
        # prefill of n tokens of one sequence never costs more than one token of n sequences
        return max(int((seconds - fixed) / max(token, 1e-9)), int(seconds / max(self.row(provisioned, start), 1e-9)))

    def ran(self, provisioned: StepLoad, total: StepLoad, seconds: float) -> None:
        """Book a step of ``total``, ``provisioned`` of it, that took ``seconds``."""
        if provisioned:
            self._since_provisioned = 0.0
            self._steps += 1
            self._guarded_seen += 1
            if self.cost.known:
                self._account(provisioned, total, seconds)
        else:
            self._since_provisioned += seconds
        # Steps far larger than provisioned ones would bend the fit: they count only until there are others.
        if provisioned or self.lingers or self._guarded_seen < MIN_SEEN:
            self.cost.observe(total, seconds)

    def _account(self, provisioned: StepLoad, total: StepLoad, seconds: float) -> None:
        alone = self.cost.predict(provisioned)
        self.credit += SHARE * alone
        if total != provisioned:
            foreseen = self.cost.predict(total) - alone
            taken = seconds - alone
            self.credit -= min(taken, _OUTLIER * foreseen + STEP_SHARE * alone)
        ceiling = self._ceiling(STEP_SHARE * alone)
        self.credit = max(-_DEBT * ceiling, min(ceiling, self.credit))
