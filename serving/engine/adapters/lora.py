"""The LoRA adapters of one model in memory, mixed token by token in one batch (``lora_plan`` says how).

Ranks and targets may differ between adapters. The concatenated factors of the last few sets of active adapters are
kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ...interface.errors import InvalidField, NotFound, PackagingError, reason
from ...interface.request import LoraTask
from ..weights.forward_context import ContextHolder
from ..weights.linear import EngineLinear, LinearGroup
from . import lora_slots
from .files import PROMPT, AdapterFiles, AdapterModule, check_fits, of_decoder, read_adapter
from .lora_plan import Factors, GroupFactors, LoraPlan, MaskedPlan, SegmentPlan, prefer_segments, segments_of
from .lora_slots import AdapterSlots
from .lora_task import TaskReader
from .virtual_tokens import Table, embedding_width

MAX_CACHED_SETS = 8  # sets of active adapters whose concatenations are kept
OVERHEAD_BYTES = 4096  # bytes counted for an adapter, and for each of its modules, beside the tensors
Groups = dict[tuple[str, ...], GroupFactors]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as the pool keeps it: ``factors`` by module name and their largest ``rank``, or a learned
    ``prompt``."""

    factors: Mapping[str, Factors]
    rank: int
    prompt: Table | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors, of the copy that steps read, which is as large, and of Python's objects."""
        tensors = sum(
            t.numel() * t.element_size()
            for f in self.factors.values()
            for t in (f.a, f.b, f.gain, f.shift)
            if t is not None
        )
        tensors += 0 if self.prompt is None else self.prompt.vectors.nbytes
        return 2 * tensors + OVERHEAD_BYTES * (1 + len(self.factors))


class LoraPool:
    """The loaded adapters by key. Only the engine's thread may use it; ``AdapterRegistry`` decides what is loaded."""

    def __init__(self, model: nn.Module, holder: ContextHolder, dtype: torch.dtype | None = None) -> None:
        linears = {m.name: m for m in model.modules() if isinstance(m, EngineLinear)}
        output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        self.head = output.name if isinstance(output, EngineLinear) else None
        self._linears = linears
        self.shapes = {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
        self._tasks = TaskReader({name: shape for name, shape in self.shapes.items() if name != self.head})
        self._width = embedding_width(model)
        self._vocab_size = output.out_features if isinstance(output, EngineLinear) else 0
        self._groups = list({id(linear.group): linear.group for linear in linears.values()}.values())
        parameter = next(model.parameters())
        self.device = parameter.device
        self._holder, self._dtype = holder, dtype or parameter.dtype
        self._adapters: dict[str, Adapter] = {}
        self._sets: OrderedDict[tuple[str, ...], Groups] = OrderedDict()
        self._alone: dict[str, Groups] = {}  # of each adapter that has run in segments
        self._slots: AdapterSlots | None = None  # if steps with adapters are recorded

    def read(self, name: str, path: str) -> Adapter:
        """Read an adapter from a peft directory onto the device. Raises ``InvalidField`` if it does not fit."""
        try:
            files = of_decoder(read_adapter(path), self.shapes)
            check_fits(files, self.shapes, self.head, width=self._width)
            if files.prompt is not None:
                return Adapter({}, 0, self._read_prompt(files))
            return Adapter(self._read_factors(files), files.rank)
        except PackagingError as error:
            raise InvalidField("adapter", name, f"an adapter that fits the base model ({error})") from None

    def read_task(self, task: LoraTask) -> Adapter:
        """Put the weights that came with a request onto the device. Raises ``InvalidField`` if they do not fit."""
        read = self._tasks.read(task)
        return Adapter({name: self._placed(name, factors) for name, factors in read.factors.items()}, read.rank)

    def _placed(self, module: str, factors: Factors) -> Factors:
        """Return a task's ``factors`` on the device. DoRA does not scale the linear's own bias."""
        gain = shift = None
        if factors.gain is not None:
            gain = factors.gain.to(self.device)
            shift = self._own_bias(module) * (1 - gain)
            gain, shift = gain.to(self._dtype).contiguous(), shift.to(self._dtype).contiguous()
        a, b = (factor.to(self.device, self._dtype) for factor in (factors.a, factors.b))
        return Factors(a, b, factors.scaling, gain, shift)

    def _own_bias(self, module: str) -> torch.Tensor:
        """Return the bias of a linear in float32; zeros if it has none."""
        linear = self._linears[module]
        bias = linear.bias
        return torch.zeros(linear.out_features, device=self.device) if bias is None else bias.detach().float()

    def add(self, key: str, adapter: Adapter) -> None:
        """Add an adapter under a key that no other has."""
        assert key not in self._adapters
        self._adapters[key] = adapter

    def remove(self, key: str) -> Adapter:
        """Remove an adapter and return it. The caller makes sure that no sequence uses it."""
        removed = self._adapters.pop(key)
        self._alone.pop(key, None)
        if self._slots is not None:
            self._slots.remove(key)
        for keys in [keys for keys in self._sets if key in keys]:
            del self._sets[keys]
        return removed

    def slots(self) -> AdapterSlots:
        """Return the slots of adapters in recorded steps, made when they are first asked for."""
        if self._slots is None:
            groups = [(group.key, group.bounds) for group in self._groups]
            self._slots = AdapterSlots(groups, self.device, self._dtype)
        return self._slots

    def fit_slots(self, names: Sequence[str | None]) -> bool:
        """Return whether one recorded step has room for the adapters ``names``: for so many, and for their ranks."""
        active = {name for name in names if name is not None}
        return len(active) < lora_slots.NUM_SLOTS and all(
            name in self._adapters and self._adapters[name].rank <= lora_slots.MAX_RANK for name in active
        )

    def slots_of(self, names: Sequence[str | None]) -> list[int]:
        """Return the slots of rows with the adapters ``names``, which ``fit_slots``."""
        factors = {name: self._adapters[name].factors for name in names if name is not None}
        return self.slots().slots_of(names, factors)

    @property
    def is_on_host(self) -> bool:
        """Return whether the model's weights are in the host's memory anyway."""
        return self.device.type == "cpu"

    def to_host(self, adapter: Adapter) -> Adapter:
        return _moved(adapter, torch.device("cpu"))

    def to_device(self, adapter: Adapter) -> Adapter:
        return _moved(adapter, self.device)

    def __len__(self) -> int:
        return len(self._adapters)

    def factors_of(self, name: str) -> Mapping[str, Factors]:
        """Return an adapter's factors by module name, the same object as long as it stays loaded. Raises
        ``NotFound``."""
        if name not in self._adapters:
            raise NotFound(f"adapter {name!r} is not loaded")
        return self._adapters[name].factors

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    def plan(self, names: Sequence[str | None], counts: Sequence[int]) -> LoraPlan | None:
        """Plan a flat row of sequences in which ``names[i]`` owns the next ``counts[i]`` tokens.

        Returns None if all tokens are the base model's. Raises ``NotFound`` for a name that is not loaded.
        """
        segments = segments_of(names, counts)
        active = tuple(sorted({name for name, _, _ in segments}))
        if not active:
            return None
        for name in active:
            if name not in self._adapters:
                raise NotFound(f"adapter {name!r} is not loaded")
        if self.device.type == "cpu":  # on other devices calls cost more than the arithmetic they save
            ranks = {name: self._adapters[name].rank for name in active}
            if prefer_segments(segments, sum(counts), ranks):
                return SegmentPlan(segments, sum(counts), self._joined_alone)
        slot_of: dict[str | None, int] = {name: slot for slot, name in enumerate(active)}
        slot_of[None] = -1
        slots = torch.tensor([slot_of[name] for name in names])
        rows = torch.repeat_interleave(slots, torch.tensor(list(counts)))
        return MaskedPlan(self._joined(active), rows.to(self.device))

    def prompt_of(self, key: str) -> Table | None:
        """Return the learned prompt of an adapter, which goes before its requests' prompts; None if it has none."""
        return self._adapters[key].prompt

    def _read_prompt(self, files: AdapterFiles) -> Table:
        try:
            with safe_open(files.weights, framework="pt") as tensors:
                vectors = tensors.get_tensor(PROMPT).float().contiguous().numpy()
        except (SafetensorError, OSError, ValueError) as error:
            raise PackagingError(f"{files.weights.name} cannot be read: {reason(error)}") from None
        if not np.isfinite(vectors).all():
            raise PackagingError(f"{PROMPT}: its numbers are not finite")
        return Table(vectors, self._vocab_size, "learned")

    def _read_factors(self, files: AdapterFiles) -> dict[str, Factors]:
        """Read the factors of the adapted modules, by name, onto the device in the pool's dtype."""
        factors: dict[str, Factors] = {}
        try:
            with safe_open(files.weights, framework="pt", device=str(self.device)) as tensors:
                for module, entry in files.modules.items():
                    a = tensors.get_tensor(entry.a_key).to(self._dtype)
                    b = tensors.get_tensor(entry.b_key).to(self._dtype)
                    more = {key: tensors.get_tensor(name).float() for key, name in entry.more.items()}
                    gain, shift = self._gain_and_shift(module, entry, a, b, more) if more else (None, None)
                    factors[module] = Factors(a, b, entry.scaling, gain, shift)
        except (SafetensorError, OSError, ValueError) as error:
            raise PackagingError(f"{files.weights.name} cannot be read: {reason(error)}") from None
        return factors

    def _gain_and_shift(
        self, module: str, entry: AdapterModule, a: torch.Tensor, b: torch.Tensor, more: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gain and shift of ``Factors``. With DoRA's magnitudes m (Liu et al. 2024), the gain of a row is
        m / |W + scaling B A|."""
        linear = self._linears[module]
        own = self._own_bias(module)
        gain = torch.ones_like(own)
        if "magnitude" in more:
            adapted = linear.weight.to(self.device, torch.float32) + entry.scaling * (b.float() @ a.float())
            gain = more["magnitude"] / torch.linalg.vector_norm(adapted, dim=1)
        shift = more.get("bias", own) - gain * own
        if "lora_bias" in more:
            shift = shift + entry.scaling * more["lora_bias"]
        if not (torch.isfinite(gain).all() and torch.isfinite(shift).all()):
            raise PackagingError(f"module {module!r}: its magnitudes or biases are not finite")
        return gain.to(self._dtype).contiguous(), shift.to(self._dtype).contiguous()

    def _joined_alone(self, name: str) -> Groups:
        if name not in self._alone:
            self._alone[name] = self._join_all((name,))
        return self._alone[name]

    def _joined(self, active: tuple[str, ...]) -> Groups:
        joined = self._sets.get(active)
        if joined is None:
            joined = self._sets[active] = self._join_all(active)
            if len(self._sets) > MAX_CACHED_SETS:
                self._sets.popitem(last=False)
        self._sets.move_to_end(active)
        return joined

    def _join_all(self, active: tuple[str, ...]) -> Groups:
        made = ((group.key, self._join(group, active)) for group in self._groups)
        return {key: factors for key, factors in made if factors is not None}

    def _join(self, group: LinearGroup, active: tuple[str, ...]) -> GroupFactors | None:
        columns: list[tuple[int, int, float]] = []
        all_a: list[torch.Tensor] = []
        members: list[tuple[int, int, int, int, torch.Tensor]] = []
        scaled: list[tuple[int, int, int, torch.Tensor, torch.Tensor]] = []
        last = 0
        for module, (start, end) in zip(group.key, group.bounds, strict=True):
            found = [(slot, self._adapters[name].factors.get(module)) for slot, name in enumerate(active)]
            present = [(slot, factors) for slot, factors in found if factors is not None]
            if not present:
                continue
            first, last = last, last + sum(factors.rank for _, factors in present)
            columns += [(slot, factors.rank, factors.scaling) for slot, factors in present]
            for slot, factors in present:
                if factors.gain is not None and factors.shift is not None:
                    scaled.append((slot, start, end, factors.gain, factors.shift))
            all_a += [factors.a for _, factors in present]
            b = torch.cat([factors.b for _, factors in present], 1).t().contiguous()
            members.append((start, end, first, last, b))
        if not members:
            return None
        return GroupFactors(torch.cat(all_a).t().contiguous(), tuple(members), tuple(columns), tuple(scaled))


def _moved(adapter: Adapter, device: torch.device) -> Adapter:
    factors = {
        name: Factors(
            f.a.to(device), f.b.to(device), f.scaling, *(None if t is None else t.to(device) for t in (f.gain, f.shift))
        )
        for name, f in adapter.factors.items()
    }
    return Adapter(factors, adapter.rank, adapter.prompt)
