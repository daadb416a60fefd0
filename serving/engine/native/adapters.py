"""The factors of each adapter as the native step reads them (lora.h): one table an adapter, [layers, members], and one
piece of memory in the order of use.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from . import library
from .library import LANES

RANK_TILE = 4  # of lora.h: ranks of A that lie together
RANK_BLOCK = 64  # ranks of B that do
MEMBERS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "",
)  # fmt: skip
Q, K, V, O, GATE, UP, DOWN, SHARE = range(len(MEMBERS))  # noqa: E741


class Pool(Protocol):
    """What ``lora.LoraPool`` offers: ``lora_plan.Factors`` by module name."""

    def factors_of(self, name: str) -> Mapping[str, Any]: ...
    def __contains__(self, name: str) -> bool: ...


class AdapterTables:
    """``prefix`` is the module name of the list of layers. ``members``: of each, as ``MEMBERS``, "" for what it has not
    by itself. ``dtype``: float32 or bfloat16, what factors are kept in."""

    def __init__(
        self, pool: Pool, prefix: str, members: Sequence[Sequence[str]], dtype: torch.dtype = torch.float32
    ) -> None:
        self._pool, self._dtype = pool, dtype
        self._names = [f"{prefix}.{layer}.{member}" for layer, each in enumerate(members) for member in each]
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
        adapted = [(entry, factors[name]) for entry, name in zip(table, self._names, strict=True) if name in factors]
        packed = _huge(sum(one.a.numel() + _columns(one.b).numel() for _, one in adapted), self._dtype)
        kept = [packed]
        at = 0
        for entry, one in adapted:
            entry.rank, entry.scale, entry.narrow = one.rank, one.scaling, self._dtype == torch.bfloat16
            for side, pieces in (("a", one.a.split(RANK_TILE)), ("b", _columns(one.b).split(RANK_BLOCK))):
                setattr(entry, side, packed.data_ptr() + at * packed.element_size())
                for piece in pieces:  # [ranks, width] as [width / LANES, ranks, LANES]
                    into = packed[at : at + piece.numel()].view(-1, len(piece), LANES)
                    into.copy_(piece.reshape(len(piece), -1, LANES).transpose(0, 1))
                    at += piece.numel()
            if one.gain is not None:
                gain, shift = _columns(one.gain[:, None])[0], _columns(one.shift[:, None])[0]
                kept += [gain, shift]
                entry.gain, entry.shift = gain.data_ptr(), shift.data_ptr()
        return table, kept


def _columns(rows: torch.Tensor) -> torch.Tensor:
    """[out, ranks] as [ranks, out], of zeros beyond where out is no multiple of LANES."""
    beyond = -rows.shape[0] % LANES
    return F.pad(rows.t(), (0, beyond)) if beyond else rows.t()


def _huge(size: int, dtype: torch.dtype) -> torch.Tensor:
    """In huge pages where there are: streaming factors misses the TLB otherwise."""
    if not size:
        return torch.empty(0, dtype=dtype)
    memory = mmap.mmap(-1, size * dtype.itemsize)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=size)
