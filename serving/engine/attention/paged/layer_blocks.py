"""The blocks of a layer's keys and values, and how a step writes them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ...devices import overlap, triton_support
from ..kv_cache import LayerShape
from ..rotation import UNFUSED, Rotation
from ..slab import Slab

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """The blocks of one layer: ``k``, ``v`` [blocks, block size, Hkv, D]; the same memory if values are the keys'
    first numbers."""

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
        return cls(shape, k, k[..., : shape.value_dim] if shape.shared else make(shape.value_dim))

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

    def write_rotated(self, indexes: Any, rotation: Rotation, v: Any) -> Any:
        """Store the rotated keys and v [Hkv, T, D] at ``indexes`` [T] and return the rotated queries [1, H, T, D]; all
        in one launch where our kernel runs."""
        if not self.shape.shared and self._fits(rotation.k[0], v) and rotated_write_is_offered(self.k, rotation.q):
            return self.write_rotated_by_kernel(indexes, rotation, v)
        q, k = rotation.apply()
        self.write(indexes, k[0], v)
        return q

    def write_rotated_by_kernel(self, indexes: Any, rotation: Rotation, v: Any) -> Any:
        """Do the same by our kernel."""
        from . import write_kernel

        q = torch.empty_like(rotation.q.transpose(1, 2), memory_format=torch.contiguous_format)
        Dv = v.shape[-1]
        write_kernel.rotate_and_write[rotation.grid](
            rotation.q, rotation.k, v, rotation.cos.contiguous(), rotation.sin.contiguous(), q, self.k, self.v,
            indexes, *rotation.strides, v.stride(0), v.stride(1), DV=Dv, DV_PADDED=1 << (Dv - 1).bit_length(),
            **rotation.sizes, **UNFUSED, **overlap.options(self.k.device),
        )  # fmt: skip
        return q.transpose(1, 2)

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


def rotated_write_is_offered(k: Any, q: Any) -> bool:
    """Return whether our kernel rotates and writes on this device, for blocks like ``k`` and queries like ``q``."""
    return triton_support.enabled(k.device) and q.dtype == k.dtype and rotates_and_writes_right(k.device, k.dtype)


@cache
def rotates_and_writes_right(device: Any, dtype: Any) -> bool:
    """Probe the kernel with three tokens, beside one kernel that rotates and torch that writes."""
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 3, heads, 16, generator=make).to(device, dtype).transpose(1, 2) for heads in (3, 2, 2))
    cos, sin = (torch.randn(1, 3, 16, generator=make).to(device, dtype) for _ in range(2))
    rotation, places = Rotation(q, k, cos, sin), torch.tensor([6, 1, 3], device=device)
    blocks = (torch.zeros(2, 4, 2, 16, dtype=dtype, device=device) for _ in range(2))
    layer = LayerBlocks(LayerShape(2, 16, 16), *blocks)

    def flat(rotated: Any, keys: Any, values: Any) -> Any:
        return torch.cat([rotated.flatten(), keys.flatten(), values.flatten()])

    def written() -> Any:
        rotated = layer.write_rotated_by_kernel(places, rotation, v[0])
        return flat(rotated, *(cube.flatten(0, 1)[places] for cube in (layer.k, layer.v)))

    def reference() -> Any:
        rotated, keys = rotation.apply()
        return flat(rotated, keys[0].transpose(0, 1), v[0].transpose(0, 1))

    reason = triton_support.why_wrong(written, reference, 0.0, "the kernel")
    if reason:
        logger.warning("keys are rotated before they are written, by two kernels: %s", reason)
    return not reason
