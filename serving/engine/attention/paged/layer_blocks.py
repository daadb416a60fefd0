"""The blocks of a layer's keys and values, and how a step writes them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ...devices import triton_support
from ..kv_cache import LayerShape
from ..slab import Slab

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """The blocks of one layer: ``k``, ``v`` [blocks, block size, Hkv, D]; the same memory if values are the keys
    themselves."""

    shape: LayerShape
    k: Any
    v: Any

    @classmethod
    def of(cls, shape: LayerShape, num_blocks: int, block_size: int, dtype: Any, device: Any) -> LayerBlocks:
        """Allocate zeroed blocks, so that unwritten slots are finite."""

        def make(dim: int) -> Any:
            size = (num_blocks, block_size, shape.num_kv_heads, dim)
            return Slab(math.prod(size), dtype, device).tensor.view(size)

        k = make(shape.key_dim)
        return cls(shape, k, k if shape.shared else make(shape.value_dim))

    def write(self, indexes: Any, k: Any, v: Any) -> None:
        """Store k, v [Hkv, T, D] at ``indexes`` [T], in one launch where our kernel runs."""
        if not self.shape.shared and self._fits(k, v) and write_is_offered(self.k.device, self.k.dtype):
            self.write_by_kernel(indexes, k, v)
            return
        for blocks, new in self._pairs(k, v):
            blocks.flatten(0, 1).index_copy_(0, indexes, new.transpose(0, 1))

    def write_by_kernel(self, indexes: Any, k: Any, v: Any) -> None:
        """Store k, v [Hkv, T, D] at ``indexes`` [T] by our kernel."""
        from . import write_kernel

        Hkv, (D, Dv) = len(k), (k.shape[-1], v.shape[-1])
        padded = {"HKV_PADDED": Hkv, "D_PADDED": D, "DV_PADDED": Dv}
        write_kernel.write_kv[(len(indexes),)](
            k, v, self.k, self.v, indexes, k.stride(0), k.stride(1), v.stride(0), v.stride(1), HKV=Hkv, D=D, DV=Dv,
            **{name: 1 << (width - 1).bit_length() for name, width in padded.items()},
        )  # fmt: skip

    def _fits(self, k: Any, v: Any) -> bool:
        return k.dtype == v.dtype == self.k.dtype and k.stride(-1) == v.stride(-1) == 1

    def copy(self, source: int, target: int) -> None:
        """Copy one block."""
        for cube in self._cubes:
            cube[target] = cube[source]

    def zero(self, blocks: Sequence[int]) -> None:
        for cube in self._cubes:
            cube[list(blocks)] = 0

    @property
    def _cubes(self) -> tuple[Any, ...]:
        return (self.k,) if self.shape.shared else (self.k, self.v)

    def _pairs(self, k: Any, v: Any) -> list[tuple[Any, Any]]:
        return [(self.k, k)] if self.shape.shared else [(self.k, k), (self.v, v)]


def write_is_offered(device: Any, dtype: Any) -> bool:
    """Return whether our kernel writes keys and values on this device."""
    return triton_support.enabled(device) and writes_right(device, dtype)


@cache
def writes_right(device: Any, dtype: Any) -> bool:
    """Probe the kernel with three tokens."""
    k = torch.randn(3, 2, 24, generator=torch.Generator().manual_seed(0)).to(device, dtype)  # [T, Hkv, D]
    layer = LayerBlocks(
        LayerShape(2, 24, 16), *(torch.zeros(2, 4, 2, dim, dtype=dtype, device=device) for dim in (24, 16))
    )
    v, places = k[..., :16], torch.tensor([6, 1, 3], device=device)

    def written() -> Any:
        layer.write_by_kernel(places, k.transpose(0, 1), v.transpose(0, 1))
        return torch.cat([cube.flatten(0, 1)[places] for cube in (layer.k, layer.v)], -1)

    reason = triton_support.why_wrong(written, lambda: torch.cat([k, v], -1), 0.0, "the kernel")
    if reason:
        logger.warning("torch writes keys and values: %s", reason)
    return not reason
