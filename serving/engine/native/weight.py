"""A ``PackedWeight`` (weight_layouts.py) of the native kernels.

Milliseconds for all linears of a SmolLM2-135M step (30 layers, fused siblings) on one Zen 4 core at 1 / 8 / 32 / 128
rows: float32 14 / 18 / 62 / 244, against 31 / 33 / 74 / 256 with oneDNN's blocked layout; int8 4.9 / 5.5 / 20 / 69.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .library import BF16, F32, INT4, INT8, LANES, ROTATED, ROTATED_INT4, free_with, has_bf16, library, required

KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.int8: INT8}  # kinds by the type of the kept numbers
PARTS = ("packed", "scale", "offset", "bias", "input")  # the parts of native.cpp's linear
Array = np.ndarray[Any, Any]


def can_pack(weight: torch.Tensor) -> bool:
    """Return whether the kernels take a weight [N, K] of this width and dtype on this device."""
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.shape[1] % LANES == 0
    return fits and library() is not None


class NativeWeight:
    """A packed weight of one ``kind``.

    F32; BF16, with both factors rounded to bfloat16; INT8, with a scale per output channel and per token; INT4, in
    groups (int4.h); ROTATED and ROTATED_INT4, like those but with both factors multiplied by a Hadamard matrix before
    they are rounded (hadamard.h). Activations of ROTATED may have factors ``inputs`` [K], by which its weights are
    divided before."""

    __slots__ = ("__weakref__", "_kept", "_library", "bias", "dtype", "handle", "in_features", "kind", "out_features")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, kind: int = F32, inputs: torch.Tensor | None = None
    ) -> None:
        found = library()
        if found is None:
            raise RuntimeError("the native kernels are not available; ask can_pack first")
        self._library: ctypes.CDLL = found
        self._kept: Mapping[str, Array] = {}
        self.kind = kind if kind != BF16 or has_bf16() else F32
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.bias = None if bias is None else bias.detach().float().contiguous()
        assert inputs is None or kind == ROTATED
        dense = weight.detach().contiguous()
        factors = None if inputs is None else inputs.contiguous()
        pointers = (None if one is None else one.data_ptr() for one in (dense, factors, self.bias))
        made = ctypes.c_void_p()
        found.mlflow_llm_linear_new(self.kind, self.in_features, self.out_features, *pointers, made)
        self._own(made.value)

    def _own(self, handle: int | None) -> None:
        self.handle = handle
        free_with(self, self._library.mlflow_llm_linear_free, handle)

    @classmethod
    def over(cls, shape: tuple[int, int], kind: int, parts: Mapping[str, Array]) -> NativeWeight:
        """Make a weight [N, K] from what ``parts`` returned. The memory is used where it is, and only read."""
        weight = cls.__new__(cls)
        weight._library = required()
        weight.out_features, weight.in_features = shape
        weight.kind, weight.dtype, weight._kept = kind, torch.float32, parts
        bias = parts.get("bias")
        weight.bias = None if bias is None else torch.from_numpy(bias.view(np.float32)[: shape[0]].copy())
        pointers = (ctypes.c_void_p * len(PARTS))(*(parts[p].ctypes.data if p in parts else None for p in PARTS))
        made = ctypes.c_void_p()
        weight._library.mlflow_llm_linear_over(kind, shape[1], shape[0], pointers, made)
        weight._own(made.value)
        return weight

    def part(self, number: int, count: int) -> NativeWeight:
        """Return weight ``number`` of the ``count`` stacked in this one, each of whole panels; valid while this one
        is."""
        shape = self.out_features // count, self.in_features
        parts = {name: array.reshape(count, -1)[number] for name, array in self.parts().items()}
        return NativeWeight.over(shape, self.kind, parts)

    @classmethod
    def of_int8(
        cls,
        values: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        is_rotated: bool = False,
        inputs: torch.Tensor | None = None,
    ) -> NativeWeight:
        """Make a weight from int8 ``values`` [N, K] and a scale per row, as ``__init__`` makes them from floats."""
        assert inputs is None or is_rotated
        return cls._made("mlflow_llm_linear_of_int8", ROTATED if is_rotated else INT8, (values, scale, inputs), bias)

    @classmethod
    def of_int4(
        cls,
        values: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor,
        inputs: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        is_rotated: bool = False,
    ) -> NativeWeight:
        """Make a weight w = (values - zero) * scale * inputs, of which each row is rotated or not.

        ``values`` is uint8 [N, K] of 0..15, ``scale`` float16 and ``zero`` uint8 [N, K / GROUP_SIZE], ``inputs``
        float32 [K]."""
        return cls._made(
            "mlflow_llm_linear_of_int4", ROTATED_INT4 if is_rotated else INT4, (values, scale, zero, inputs), bias
        )

    @classmethod
    def _made(
        cls, maker: str, kind: int, given: tuple[torch.Tensor | None, ...], bias: torch.Tensor | None
    ) -> NativeWeight:
        weight = cls.__new__(cls)
        weight._library, weight._kept = required(), {}
        assert given[0] is not None
        weight.out_features, weight.in_features = given[0].shape
        weight.kind, weight.dtype = kind, torch.float32
        weight.bias = None if bias is None else bias.detach().float().contiguous()
        parts = [None if part is None else part.contiguous() for part in (*given, weight.bias)]
        made = ctypes.c_void_p()
        make = getattr(weight._library, maker)
        pointers = (None if part is None else part.data_ptr() for part in parts)
        make(kind, weight.in_features, weight.out_features, *pointers, made)
        weight._own(made.value)
        return weight

    def parts(self) -> dict[str, Array]:
        """Return the parts of the weight as bytes: views that are valid as long as the weight is."""
        pointers, sizes = (ctypes.c_void_p * len(PARTS))(), (ctypes.c_int64 * len(PARTS))()
        self._library.mlflow_llm_linear_parts(self.handle, pointers, sizes)
        return {
            name: np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint8)), (size,))
            for name, pointer, size in zip(PARTS, pointers, sizes, strict=True)
            if size
        }

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = x.new_empty((x.shape[0], self.out_features))
        self._library.mlflow_llm_linear_multiply(self.handle, x.shape[0], x.data_ptr(), y.data_ptr())
        return y

    def dense(self) -> torch.Tensor:
        weight = torch.empty((self.out_features, self.in_features), dtype=self.dtype)
        self._library.mlflow_llm_linear_dense(self.handle, weight.data_ptr())
        return weight


__all__ = ["BF16", "F32", "INT8", "KINDS", "ROTATED", "NativeWeight", "can_pack"]
