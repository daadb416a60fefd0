"""The factors of each adapter as the native step reads them (lora.h).

Each adapter has one table, [layers, members], and one piece of memory in the order of use.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from . import library
from .library import LANES
from .weight import KINDS

HUGE_PAGE_BYTES = 2 << 20  # bytes
RANK_TILE = 4  # ranks of A that are stored together, as in lora.h
RANK_BLOCK = 64  # ranks of B that are stored together
MEMBERS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "",
)  # fmt: skip
Q, K, V, O, GATE, UP, DOWN, SHARED_EXPERT_GATE = range(len(MEMBERS))  # noqa: E741


class Pool(Protocol):
    """The part of ``lora.LoraPool`` used here: ``lora_plan.Factors`` by module name."""

    def factors_of(self, name: str) -> Mapping[str, Any]: ...
    def __contains__(self, name: str) -> bool: ...


class AdapterTables:
    """The tables of all adapters.

    ``prefix`` is the module name of the list of layers. ``members``: each layer's linears in the order of ``MEMBERS``,
    "" for those that it does not have separately. ``dtype``: the type that factors are kept in, float32, bfloat16 or
    int8 with one scale per rank."""

    def __init__(
        self, pool: Pool, prefix: str, members: Sequence[Sequence[str]], dtype: torch.dtype = torch.float32
    ) -> None:
        self._pool, self._dtype = pool, dtype
        self._names = [f"{prefix}.{layer}.{member}" for layer, each in enumerate(members) for member in each]
        self._tables: dict[str, tuple[Mapping[str, Any], Any, list[torch.Tensor]]] = {}

    def numbered(self, names: Sequence[str | None]) -> tuple[list[int], Any]:
        """Return a number for each of ``names`` (-1 for the base), and the array of tables that they index."""
        order = {name: number for number, name in enumerate(dict.fromkeys(n for n in names if n is not None))}
        tables = [ctypes.addressof(self._table(name)) for name in order]
        return [-1 if name is None else order[name] for name in names], (ctypes.c_void_p * max(len(tables), 1))(*tables)

    def _table(self, name: str) -> Any:
        factors = self._pool.factors_of(name)
        known = self._tables.get(name)
        if known is None or known[0] is not factors:  # newly loaded, or read from disk again
            self._tables = {one: table for one, table in self._tables.items() if one in self._pool}
            known = self._tables[name] = (factors, *self._fill(factors))
        return known[1]

    def _fill(self, factors: Mapping[str, Any]) -> tuple[Any, list[torch.Tensor]]:
        table = (library.Factors * len(self._names))()
        adapted = [(entry, factors[name]) for entry, name in zip(table, self._names, strict=True) if name in factors]
        packed = huge_pages(sum(one.a.numel() + _columns(one.b).numel() for _, one in adapted), self._dtype)
        kept = [packed]
        at = 0
        for entry, one in adapted:
            scales = torch.full((one.rank,), one.scaling, dtype=torch.float32)
            entry.rank, entry.kind = one.rank, KINDS[self._dtype]
            for side, rows, together in (("a", one.a, RANK_TILE), ("b", _columns(one.b), RANK_BLOCK)):
                setattr(entry, side, packed.data_ptr() + at * packed.element_size())
                if self._dtype == torch.int8:
                    rows, by = _rounded(rows.float())
                    scales *= by
                for piece in rows.split(together):
                    _lay(piece, packed[at : at + piece.numel()])
                    at += piece.numel()
            kept.append(scales)
            entry.scales = scales.data_ptr()
            if one.gain is not None:
                gain, shift = _columns(one.gain[:, None])[0], _columns(one.shift[:, None])[0]
                kept += [gain, shift]
                entry.gain, entry.shift = gain.data_ptr(), shift.data_ptr()
        return table, kept


def _rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [ranks, width] rounded to int8, and the scale of each rank."""
    scales = rows.abs().amax(1) / 127
    return (rows / torch.where(scales > 0, scales, 1.0)[:, None]).round().to(torch.int8), scales


def _lay(piece: torch.Tensor, into: torch.Tensor) -> None:
    """Lay out [ranks, width] as [width / LANES, ranks, LANES], in bfloat16 with ranks interleaved in pairs, as lora.h
    reads them."""
    ranks = len(piece)
    blocks, into = piece.reshape(ranks, -1, LANES).transpose(0, 1), into.view(-1, ranks, LANES)
    paired = ranks // 2 * 2 if into.dtype == torch.bfloat16 else 0
    into[:, paired:].copy_(blocks[:, paired:])
    if paired:
        pairs = into.flatten(1)[:, : paired * LANES].unflatten(1, (-1, LANES, 2))
        pairs.copy_(blocks[:, :paired].unflatten(1, (-1, 2)).transpose(2, 3))


def _columns(rows: torch.Tensor) -> torch.Tensor:
    """Return [out, ranks] as [ranks, out], padded with zeros to a multiple of LANES."""
    beyond = -rows.shape[0] % LANES
    return F.pad(rows.t(), (0, beyond)) if beyond else rows.t()


def huge_pages(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate memory in huge pages if possible, since streaming factors would otherwise miss the TLB."""
    bytes_ = size * dtype.itemsize
    if bytes_ < HUGE_PAGE_BYTES:
        return torch.empty(size, dtype=dtype)
    whole = -(-bytes_ // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = mmap.mmap(
        -1, whole + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # private: shared gets none
    offset = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE_BYTES
    with contextlib.suppress(OSError):  # kernels without huge pages refuse the advice
        memory.madvise(mmap.MADV_HUGEPAGE, offset, whole)
    return torch.frombuffer(memory, dtype=dtype, count=size, offset=offset)
