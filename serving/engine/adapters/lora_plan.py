"""The part that adapters add to the linears of one step, computed in one of two ways that give the same result.

Masked: A and B of the step's active adapters are concatenated along the rank, and a mask gives each token its columns::

    x [T, K] @ A_cat [K, R] = h [T, R];  h *= mask [T, R];  y [T, N] += h @ B_cat [R, N]

              ranks of adapter 0   ranks of adapter 1
    token 0 (adapter 1)   0  0  0    s  s          s = the module's scaling
    token 1 (base)        0  0  0    0  0          a base row adds zeros, so it is unchanged
    token 2 (adapter 0)   s  s  s    0  0

By segments: neighbouring tokens of one adapter are multiplied by its factors alone. This takes less arithmetic but more
calls. Milliseconds per linear on one thread of the machine of docs/performance.md, K 576, N 3072, ranks 4, 8, 16 in
turn (the linear's own GEMM takes 16.8 ms at 512 rows, 4.2 at 128, 1.1 at 32):

    rows, adapters   512, 2   512, 4   512, 8   512, 16   128, 8   128, 16   32, 8   32, 16
    masked             0.90     1.57     3.02      6.03     0.75      1.54    0.22     0.50
    by segments        1.09     1.06     1.13      1.20     0.26      0.34    0.10     0.20

Siblings that share a GEMM also share ``x @ A``: R runs over the members first, then over the adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...interface.errors import InternalError

Columns = tuple[tuple[int, int, float], ...]  # (slot of the adapter in the set, rank, scaling), in column order
Segment = tuple[str, int, int]  # adapter, first and last row
SEGMENT_COST = 100  # cost of one segment's calls, in rows x ranks of arithmetic
SEGMENT_GAIN = 2  # segments are preferred if masks cost this many times more; below it the difference is noise


@dataclass(frozen=True, slots=True)
class Factors:
    """One adapter on one linear: ``a`` [r, K], ``b`` [N, r].

    ``gain`` and ``shift`` [N] express DoRA's magnitudes and the adapter's own biases: the linear's output plus what A
    and B add is multiplied by ``gain``, then ``shift`` is added."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    gain: torch.Tensor | None = None
    shift: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class GroupFactors:
    """The factors of a set of adapters, concatenated for one GEMM.

    ``a`` is [K, R]. ``members`` has, for each adapted member, (first and last output column, first and last rank
    column, ``b`` [ranks, outputs]). ``columns`` says which adapter owns which of the R columns. ``scaled`` has (slot of
    the adapter, first and last output column, ``gain``, ``shift``) for the factors that have them."""

    a: torch.Tensor
    members: tuple[tuple[int, int, int, int, torch.Tensor], ...]
    columns: Columns
    scaled: tuple[tuple[int, int, int, torch.Tensor, torch.Tensor], ...] = ()


@dataclass(frozen=True, slots=True)
class RowFactors:
    """One adapter on a linear that is multiplied in another order (``latent_attention``).

    ``rows`` are the adapter's rows of the step; ``a`` is [K, r], ``b`` [r, N], ``gain`` and ``shift`` [N] as in
    ``Factors``."""

    rows: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    gain: torch.Tensor | None = None
    shift: torch.Tensor | None = None


def _apart(group: GroupFactors, rows_of: Callable[[int], torch.Tensor]) -> list[RowFactors]:
    """Return the factors by adapter of a linear that does not share its GEMM."""
    ((_, _, _, _, b),) = group.members
    more = {slot: (gain, shift) for slot, _, _, gain, shift in group.scaled}
    found, first = [], 0
    for slot, rank, scaling in group.columns:
        last = first + rank
        found.append(RowFactors(rows_of(slot), group.a[:, first:last], b[first:last], scaling, *more.get(slot, ())))
        first = last
    return found


class MaskedPlan:
    """The contributions of a step by masks: the concatenated factors of its active adapters, and each row's adapter.

    ``slots`` [T]: the row's adapter in the set, -1 for the base.
    """

    __slots__ = ("_groups", "_masks", "_slots")

    def __init__(self, groups: dict[tuple[str, ...], GroupFactors], slots: torch.Tensor) -> None:
        self._groups = groups
        self._slots = slots[:, None]
        self._masks: dict[Columns, torch.Tensor] = {}  # only a few, since layers have the same columns

    def add_to(self, key: tuple[str, ...], x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the adapters' part to ``y`` [T, N] in place, from the input ``x`` [T, K] of the linear group ``key``."""
        group = self._groups.get(key)
        if group is None:
            return
        if x.shape[0] != self._slots.shape[0]:
            raise InternalError(f"{key[0]} was called with {x.shape[0]} rows in a step of {self._slots.shape[0]}")
        h = torch.mm(x, group.a).mul_(self._mask(group.columns, x.dtype))
        for start, end, first, last, b in group.members:
            y[:, start:end].addmm_(h[:, first:last], b)
        for slot, start, end, gain, shift in group.scaled:
            rows = (self._slots[:, 0] == slot).nonzero()[:, 0]
            y[rows, start:end] = y[rows, start:end] * gain + shift

    def by_rows(self, key: tuple[str, ...]) -> list[RowFactors]:
        """Return the factors of each active adapter on the linear ``key``, which is alone in its group."""
        group = self._groups.get(key)
        return [] if group is None else _apart(group, lambda slot: (self._slots[:, 0] == slot).nonzero()[:, 0])

    def _mask(self, columns: Columns, dtype: torch.dtype) -> torch.Tensor:
        mask = self._masks.get(columns)
        if mask is None:
            owner = torch.tensor([slot for slot, rank, _ in columns for _ in range(rank)], device=self._slots.device)
            scale = torch.tensor([s for _, rank, s in columns for _ in range(rank)], device=owner.device, dtype=dtype)
            mask = self._masks[columns] = (self._slots == owner).to(dtype).mul_(scale)
        return mask


class SegmentPlan:
    """The part of one step by ``segments`` of the row. ``groups_of`` returns the factors of one adapter alone."""

    __slots__ = ("_groups", "_num_rows", "_scales", "_segments")

    def __init__(
        self,
        segments: Sequence[Segment],
        num_rows: int,
        groups_of: Callable[[str], Mapping[tuple[str, ...], GroupFactors]],
    ) -> None:
        self._segments, self._num_rows = segments, num_rows
        self._groups = {name: groups_of(name) for name, _, _ in segments}
        self._scales: dict[Columns, torch.Tensor] = {}

    def add_to(self, key: tuple[str, ...], x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the adapters' part to ``y`` [T, N] in place, from the input ``x`` [T, K] of the linear group ``key``."""
        for name, first, last in self._segments:
            group = self._groups[name].get(key)
            if group is None:
                continue
            if x.shape[0] != self._num_rows:  # as for the head, which has the rows alone whose logits are needed
                raise InternalError(f"{key[0]} was called with {x.shape[0]} rows in a step of {self._num_rows}")
            h = torch.mm(x[first:last], group.a).mul_(self._scale(group.columns, x))
            for start, end, low, high, b in group.members:
                y[first:last, start:end].addmm_(h[:, low:high], b)
            for _, start, end, gain, shift in group.scaled:
                y[first:last, start:end].mul_(gain).add_(shift)

    def by_rows(self, key: tuple[str, ...]) -> list[RowFactors]:
        """See ``MaskedPlan.by_rows``."""
        found: list[RowFactors] = []
        for name, first, last in self._segments:
            group = self._groups[name].get(key)
            if group is not None:
                rows = torch.arange(first, last, device=group.a.device)
                found += _apart(group, lambda _, rows=rows: rows)  # type: ignore[misc]
        return found

    def _scale(self, columns: Columns, like: torch.Tensor) -> torch.Tensor:
        scale = self._scales.get(columns)
        if scale is None:
            values = [scaling for _, rank, scaling in columns for _ in range(rank)]
            scale = self._scales[columns] = torch.tensor(values, device=like.device, dtype=like.dtype)
        return scale


LoraPlan = MaskedPlan | SegmentPlan


def segments_of(names: Sequence[str | None], counts: Sequence[int]) -> list[Segment]:
    """Return the segments of a row. Neighbouring sequences of one adapter form one; the base's rows are in none."""
    segments: list[Segment] = []
    at = 0
    for name, count in zip(names, counts, strict=True):
        if name is not None and count:
            if segments and segments[-1][0] == name and segments[-1][2] == at:
                segments[-1] = (name, segments[-1][1], at + count)
            else:
                segments.append((name, at, at + count))
        at += count
    return segments


def prefer_segments(segments: Sequence[Segment], num_rows: int, rank_of: Mapping[str, int]) -> bool:
    """Return whether ``segments`` cost clearly less than multiplying all rows by the ranks of all active adapters."""
    masked = num_rows * sum(rank_of[name] for name in {name for name, _, _ in segments})
    alone = sum((last - first) * rank_of[name] + SEGMENT_COST for name, first, last in segments)
    return masked > SEGMENT_GAIN * alone
