"""Adapters in slots, so that decode steps with adapters can be recorded: which slot a row has is all that changes.

::

    rows of a step    s1   s2   s1   base           slots    0 (none)   1: "s1"   2: "s2"   3: free …
    its buffer         1    2    1     0            tables   where each slot's factors are, a row of addresses a slot

An adapter gets a slot when a step needs it, if need be that of the adapter that was used longest ago.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ...interface.errors import InternalError
from ..devices import triton_support
from ..devices.transfers import upload_values
from .lora_plan import Factors, RowFactors

logger = logging.getLogger(__name__)
NUM_SLOTS = 33  # one of them for the base
MAX_RANK = 64
RANK_BLOCK = 16
SPLIT_K = 1024
BLOCK_K = 256
BLOCK_N = 256
ALIGNMENT_BYTES = 16  # bytes, which the kernels rely on
TOLERANCE = {torch.float32: 1e-4}  # relative to the example's largest value; 0.02 for 16-bit types
Groups = Sequence[tuple[tuple[str, ...], Sequence[tuple[int, int]]]]
"""The linear groups of a model: the members' names, and their output columns."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A linear group in the tables: the place of its first member, and on the device the members' columns."""

    first: int
    bounds: Any
    widest: int


class AdapterSlots:
    """The slots of adapters on one device, and the addresses of their factors at fixed places."""

    def __init__(self, groups: Groups, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self.dtype = device, dtype
        self._names = [name for key, _ in groups for name in key]
        self.groups: dict[tuple[str, ...], _Group] = {}
        first = 0
        for key, bounds in groups:
            columns = upload_values([list(one) for one in bounds], torch.int32, device)
            self.groups[key] = _Group(first, columns, max(end - start for start, end in bounds))
            first += len(key)
        self.tables = torch.zeros(NUM_SLOTS, first, 4, dtype=torch.int64, device=device)
        self.ranks = torch.zeros(NUM_SLOTS, first, dtype=torch.int32, device=device)
        self.scales = torch.zeros(NUM_SLOTS, first, dtype=torch.float32, device=device)
        self._slots: OrderedDict[str, int] = OrderedDict()  # the one used longest ago first
        self._free = list(range(NUM_SLOTS - 1, 0, -1))
        self._kept: dict[str, list[torch.Tensor]] = {}  # what the tables have addresses of

    def slots_of(self, names: Sequence[str | None], factors: Mapping[str, Mapping[str, Factors]]) -> list[int]:
        """Return the slot of each row's adapter. Of those among ``names``, of which there may be as many as slots,
        ``factors`` has the factors by module name."""
        needed = dict.fromkeys(name for name in names if name is not None)
        for name in needed:
            if name in self._slots:
                self._slots.move_to_end(name)
        for name in needed:
            if name not in self._slots:
                if not self._free:
                    self.remove(next(iter(self._slots)))
                self._slots[name] = self._free.pop()
                self._put(name, factors[name])
        return [0 if name is None else self._slots[name] for name in names]

    def remove(self, name: str) -> None:
        """Free the slot of an adapter, if it has one. No row of a later step may have it."""
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._free.append(slot)
            del self._kept[name]

    def _put(self, name: str, factors: Mapping[str, Factors]) -> None:
        kept: list[torch.Tensor] = []

        def address(tensor: torch.Tensor | None) -> int:
            if tensor is None:
                return 0
            whole = tensor.contiguous()
            kept.append(whole if whole.data_ptr() % ALIGNMENT_BYTES == 0 else whole.clone())
            return int(kept[-1].data_ptr())

        rows, ranks, scales = [], [], []
        for module in self._names:
            own = factors.get(module)
            ranks.append(0 if own is None else own.rank)
            scales.append(0.0 if own is None else own.scaling)
            rows.append([0] * 4 if own is None else [address(t) for t in (own.a, own.b.t(), own.gain, own.shift)])
        slot = self._slots[name]
        self.tables[slot].copy_(upload_values(rows, torch.int64, self._device))
        self.ranks[slot].copy_(upload_values(ranks, torch.int32, self._device))
        self.scales[slot].copy_(upload_values(scales, torch.float32, self._device))
        self._kept[name] = kept


class SlotPlan:
    """The contributions of a step by slots. ``rows`` int32 [T], at a fixed address, has each row's slot."""

    __slots__ = ("_slots", "rows")

    def __init__(self, slots: AdapterSlots, num_rows: int) -> None:
        self._slots = slots
        self.rows = torch.zeros(num_rows, dtype=torch.int32, device=slots.tables.device)

    def add_to(self, key: tuple[str, ...], x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the adapters' part to ``y`` [T, N] in place, from the input ``x`` [T, K] of the linear group ``key``."""
        group = self._slots.groups.get(key)
        if group is None:
            return
        if x.shape[0] != self.rows.shape[0] or not y.is_contiguous():
            raise InternalError(f"{key[0]} was called with {x.shape[0]} rows in a step of {self.rows.shape[0]}")
        from . import slots_kernel as kernel

        slots, (rows, K), members = self._slots, x.shape, len(key)
        modules, splits = slots.ranks.shape[1], -(-K // SPLIT_K)
        h = torch.empty(rows, members, splits, MAX_RANK, dtype=torch.float32, device=x.device)
        same = {"MEMBERS": members, "SPLITS": splits, "MAX_RANK": MAX_RANK, "RANK_BLOCK": RANK_BLOCK}
        kernel.shrink[(rows, members * (MAX_RANK // RANK_BLOCK), splits)](
            x.contiguous(), self.rows, slots.tables, slots.ranks, h, K, group.first, modules,
            SPLIT_K=SPLIT_K, BLOCK_K=BLOCK_K, **same,
        )  # fmt: skip
        blocks = -(-group.widest // BLOCK_N)
        kernel.expand[(rows, members * blocks)](
            h, self.rows, slots.tables, slots.ranks, slots.scales, group.bounds, y, y.shape[1], group.first, modules,
            blocks, BLOCK_N=BLOCK_N, **same,
        )  # fmt: skip

    def by_rows(self, key: tuple[str, ...]) -> list[RowFactors]:
        """See ``MaskedPlan.by_rows``. Models that ask for it have no slots."""
        raise InternalError(f"{key[0]} is multiplied in another order than by slots")


def why_not(device: torch.device, dtype: torch.dtype) -> str:
    """Return why the kernels do not run; empty if they do and give what torch gives on an example."""
    return triton_support.why_disabled(device) or probe(device, dtype)


@cache
def probe(device: torch.device, dtype: torch.dtype) -> str:
    """Probe the kernels with rows of two adapters and the base."""
    make = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=make).to(device, dtype)

    slots = AdapterSlots([(("a", "b"), [(0, 40), (40, 340)])], device, dtype)
    factors = {
        "one": {
            "a": Factors(random(3, 1100), random(40, 3), 0.5),
            "b": Factors(random(20, 1100), random(300, 20), 2.0),
        },
        "two": {"b": Factors(random(16, 1100), random(300, 16), 1.0, random(300), random(300))},
    }
    names, x, y = ["two", None, "one"], random(3, 1100) / 33, random(3, 340)
    plan = SlotPlan(slots, len(names))
    plan.rows.copy_(upload_values(slots.slots_of(names, factors), torch.int32, device))

    def found() -> torch.Tensor:
        out = y.clone()
        plan.add_to(("a", "b"), x, out)
        return out

    def wanted() -> torch.Tensor:
        out = y.clone().float()
        for row, name in enumerate(names):
            for module, (start, end) in (("a", (0, 40)), ("b", (40, 340))):
                own = factors.get(name or "", {}).get(module)
                if own is not None:
                    part = out[row, start:end]
                    part += own.scaling * (own.b.float() @ (own.a.float() @ x[row].float()))
                    if own.gain is not None and own.shift is not None:
                        part.mul_(own.gain.float()).add_(own.shift.float())
        return out

    reason = triton_support.why_wrong(found, wanted, TOLERANCE.get(dtype, 0.02), "the kernel")
    if reason:
        logger.warning("steps with adapters are not recorded: %s", reason)
    return reason
