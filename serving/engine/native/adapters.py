"""Where the factors of each adapter lie, as the native step reads them: one table an adapter, [layers, members]."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from . import library

MEMBERS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


class Pool(Protocol):
    """What ``lora.LoraPool`` offers: ``lora_plan.Factors`` by module name."""

    def factors_of(self, name: str) -> Mapping[str, Any]: ...
    def __contains__(self, name: str) -> bool: ...


class AdapterTables:
    """``prefix`` is the module name of the list of layers."""

    def __init__(self, pool: Pool, prefix: str, num_layers: int) -> None:
        self._pool = pool
        self._names = [f"{prefix}.{layer}.{member}" for layer in range(num_layers) for member in MEMBERS]
        self._tables: dict[str, tuple[Mapping[str, Any], Any, list[torch.Tensor]]] = {}

    def numbered(self, names: Sequence[str | None]) -> tuple[list[int], Any]:
        """A number for each of ``names`` (-1: the base) and the array of tables they index."""
        order = {name: number for number, name in enumerate(dict.fromkeys(n for n in names if n is not None))}
        tables = [ctypes.addressof(self._table(name)) for name in order]
        return [-1 if name is None else order[name] for name in names], (ctypes.c_void_p * max(len(tables), 1))(*tables)

    def _table(self, name: str) -> Any:
        factors = self._pool.factors_of(name)
        known = self._tables.get(name)
        if known is None or known[0] is not factors:  # loaded, or read from disk anew
            self._tables = {one: table for one, table in self._tables.items() if one in self._pool}
            known = self._tables[name] = (factors, *self._fill(factors))
        return known[1]

    def _fill(self, factors: Mapping[str, Any]) -> tuple[Any, list[torch.Tensor]]:
        table = (library.Factors * len(self._names))()
        kept: list[torch.Tensor] = []
        for entry, name in zip(table, self._names, strict=True):
            found = factors.get(name)
            if found is not None:
                a, bt = found.a.contiguous(), found.b.t().contiguous()
                kept += [a, bt]
                entry.a, entry.bt, entry.rank, entry.scale = a.data_ptr(), bt.data_ptr(), found.rank, found.scaling
                if found.gain is not None:
                    kept += [found.gain, found.shift]
                    entry.gain, entry.shift = found.gain.data_ptr(), found.shift.data_ptr()
        return table, kept
