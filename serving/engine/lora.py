"""The adapters of one model in memory, mixed token by token in one batch.

For the adapters active in a step, A and B are concatenated along the rank and each token sees its own columns::

    x [T, K] @ A_cat [K, R] = h [T, R];  h *= mask [T, R];  y [T, N] += h @ B_cat [R, N]

              ranks of adapter 0   ranks of adapter 1
    token 0 (adapter 1)   0  0  0    s  s          s = the module's scaling
    token 1 (base)        0  0  0    0  0          a base row adds zeros: unchanged
    token 2 (adapter 0)   s  s  s    0  0

Siblings that share a GEMM share ``x @ A_cat`` too: R runs over the members first, then over the adapters. The
concatenations are kept for the last few sets of active adapters; ranks and targets may differ between adapters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import nn

from ..errors import AlreadyExists, InternalError, InvalidField, LimitExceeded, NotFound, PackagingError
from .adapter_files import AdapterFiles, check_fits, read_adapter
from .interface import AdapterInfo
from .linear import EngineLinear, LinearGroup
from .step import StepHolder

MAX_CACHED_SETS = 8  # sets of active adapters whose concatenations are kept
Columns = tuple[tuple[int, int, float], ...]  # (slot of the adapter in the set, rank, scaling), in column order


@dataclass(frozen=True, slots=True)
class Factors:
    """One adapter on one linear: ``a`` [r, K], ``b`` [N, r]."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class GroupFactors:
    """Concatenated for one GEMM: ``a`` [K, R]; for each adapted member (first and last output column, first and last
    rank column, ``b`` [ranks, outputs]); ``columns`` says whose the R columns are."""

    a: torch.Tensor
    members: tuple[tuple[int, int, int, int, torch.Tensor], ...]
    columns: Columns


class LoraPlan:
    """What one step adds: the concatenations of its active adapters and whose each row is.

    ``slots`` [T]: the row's adapter in the set, -1 for the base.
    """

    __slots__ = ("_groups", "_masks", "_slots")

    def __init__(self, groups: dict[tuple[str, ...], GroupFactors], slots: torch.Tensor) -> None:
        self._groups = groups
        self._slots = slots[:, None]
        self._masks: dict[Columns, torch.Tensor] = {}  # few: layers repeat the same columns

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

    def _mask(self, columns: Columns, dtype: torch.dtype) -> torch.Tensor:
        mask = self._masks.get(columns)
        if mask is None:
            owner = torch.tensor([slot for slot, rank, _ in columns for _ in range(rank)], device=self._slots.device)
            scale = torch.tensor([s for _, rank, s in columns for _ in range(rank)], device=owner.device, dtype=dtype)
            mask = self._masks[columns] = (self._slots == owner).to(dtype).mul_(scale)
        return mask


class LoraPool:
    """Owned by the engine's thread. ``max_adapters`` bounds what is loaded, not what one batch mixes."""

    def __init__(
        self, model: nn.Module, holder: StepHolder, max_adapters: int, dtype: torch.dtype | None = None
    ) -> None:
        linears = {m.name: m for m in model.modules() if isinstance(m, EngineLinear)}
        output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        self._head = output.name if isinstance(output, EngineLinear) else None
        self._shapes = {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
        self._groups = list({id(linear.group): linear.group for linear in linears.values()}.values())
        parameter = next(model.parameters())
        self._device = parameter.device
        self._holder, self._max_adapters, self._dtype = holder, max_adapters, dtype or parameter.dtype
        self._adapters: dict[str, dict[str, Factors]] = {}
        self._infos: dict[str, AdapterInfo] = {}
        self._sets: OrderedDict[tuple[str, ...], dict[tuple[str, ...], GroupFactors]] = OrderedDict()

    def load(self, name: str, path: str) -> AdapterInfo:
        """Read peft's directory. Raises ``InvalidField`` (does not fit), ``AlreadyExists``, ``LimitExceeded``."""
        if name in self._adapters:
            raise AlreadyExists(f"adapter {name!r} is already loaded")
        if len(self._adapters) >= self._max_adapters:
            raise LimitExceeded(
                f"{self._max_adapters} adapters are loaded, as many as max_adapters allows",
                limit="max_adapters",
                allowed=self._max_adapters,
                remaining=0,
            )
        try:
            files = read_adapter(path)
            check_fits(files, self._shapes, self._head)
        except PackagingError as error:
            raise InvalidField("adapter", name, f"a LoRA adapter that fits the base model ({error})") from None
        self._adapters[name] = self._read_factors(files)
        self._infos[name] = AdapterInfo(name=name, rank=files.rank, path=path)
        return self._infos[name]

    def unload(self, name: str) -> None:
        """Raises ``NotFound``. The caller makes sure that no sequence uses the adapter."""
        if name not in self._adapters:
            raise NotFound(f"adapter {name!r} is not loaded")
        del self._adapters[name], self._infos[name]
        for key in [key for key in self._sets if name in key]:
            del self._sets[key]

    def factors_of(self, name: str) -> Mapping[str, Factors]:
        """By module name; the same object for as long as the adapter stays loaded. Raises ``NotFound``."""
        if name not in self._adapters:
            raise NotFound(f"adapter {name!r} is not loaded")
        return self._adapters[name]

    def infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(self._infos.values())

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    def plan(self, names: Sequence[str | None], counts: Sequence[int]) -> LoraPlan | None:
        """For a flat row of sequences: ``names[i]`` owns the next ``counts[i]`` tokens. None where all are the base's.

        Raises ``NotFound`` for a name that is not loaded.
        """
        active = tuple(sorted({name for name in names if name is not None}))
        if not active:
            return None
        slot_of: dict[str | None, int] = {name: slot for slot, name in enumerate(active)}
        slot_of[None] = -1
        slots = torch.tensor([slot_of[name] for name in names])
        rows = torch.repeat_interleave(slots, torch.tensor(list(counts)))
        return LoraPlan(self._joined(active), rows.to(self._device))

    def _read_factors(self, files: AdapterFiles) -> dict[str, Factors]:
        """Onto the device in the pool's dtype; adapted modules by name."""
        factors: dict[str, Factors] = {}
        with safe_open(files.weights, framework="pt", device=str(self._device)) as tensors:
            for module, entry in files.modules.items():
                a = tensors.get_tensor(entry.a_key).to(self._dtype)
                b = tensors.get_tensor(entry.b_key).to(self._dtype)
                factors[module] = Factors(a, b, entry.scaling)
        return factors

    def _joined(self, active: tuple[str, ...]) -> dict[tuple[str, ...], GroupFactors]:
        joined = self._sets.get(active)
        if joined is None:
            for name in active:
                if name not in self._adapters:
                    raise NotFound(f"adapter {name!r} is not loaded")
            made = ((group.key, self._join(group, active)) for group in self._groups)
            joined = {key: factors for key, factors in made if factors is not None}
            self._sets[active] = joined
            if len(self._sets) > MAX_CACHED_SETS:
                self._sets.popitem(last=False)
        self._sets.move_to_end(active)
        return joined

    def _join(self, group: LinearGroup, active: tuple[str, ...]) -> GroupFactors | None:
        columns: list[tuple[int, int, float]] = []
        all_a: list[torch.Tensor] = []
        members: list[tuple[int, int, int, int, torch.Tensor]] = []
        last = 0
        for module, (start, end) in zip(group.key, group.bounds, strict=True):
            found = [(slot, self._adapters[name].get(module)) for slot, name in enumerate(active)]
            present = [(slot, factors) for slot, factors in found if factors is not None]
            if not present:
                continue
            first, last = last, last + sum(factors.rank for _, factors in present)
            columns += [(slot, factors.rank, factors.scaling) for slot, factors in present]
            all_a += [factors.a for _, factors in present]
            b = torch.cat([factors.b for _, factors in present], 1).t().contiguous()
            members.append((start, end, first, last, b))
        if not members:
            return None
        return GroupFactors(torch.cat(all_a).t().contiguous(), tuple(members), tuple(columns))
