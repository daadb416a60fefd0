"""Computes rotary embeddings of queries and keys by one kernel of ours instead of ten of torch's.

transformers' attention modules call a function of their file, ``apply_rotary_pos_emb(q, k, cos, sin)``. A module whose
function proves to rotate halves runs the same code with that one name bound to ours, which calls the model's own for
arguments of any other form.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ...devices import triton_support

logger = logging.getLogger(__name__)
NAME = "apply_rotary_pos_emb"
HEADS = 8  # of a token to a program
TOLERANCE = {torch.float32: 1e-6}  # relative to the example's largest value; otherwise nothing may differ


def install(model: nn.Module) -> int:
    """Bind the kernel in the attention modules for which it is right; return how many (0 if the device runs none)."""
    like = next(model.parameters())
    if not triton_support.enabled(like.device):
        return 0
    forwards: dict[tuple[type, int], Any] = {}
    count = 0
    for module in model.modules():
        width = getattr(module, "head_dim", None)
        if getattr(module, "layer_idx", None) is None or not isinstance(width, int):
            continue
        key = type(module), width
        if key not in forwards:
            forwards[key] = _forward_for(type(module), width, like)
        if forwards[key] is not None:
            object.__setattr__(module, "forward", MethodType(forwards[key], module))
            count += 1
    left = sorted({kind.__name__ for (kind, _), forward in forwards.items() if forward is None})
    if left:
        logger.info("torch, not our kernel, computes the rotary embeddings of %s", ", ".join(left))
    return count


def _forward_for(kind: type, width: int, like: torch.Tensor) -> Any:
    """Return the class's forward with our function in it; None if that is not what its own function computes."""
    forward: Any = kind.forward  # type: ignore[attr-defined]
    own = getattr(forward, "__globals__", {}).get(NAME)
    if own is None or NAME not in forward.__code__.co_names or not _agrees(own, width, like):
        return None
    names = forward.__globals__ | {NAME: partial(rotated, own)}
    bound = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    bound.__kwdefaults__ = forward.__kwdefaults__
    return bound


def _agrees(own: Callable[..., Any], width: int, like: torch.Tensor) -> bool:
    make = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=make).to(like.device, like.dtype)

    q, k = random(1, 3, 5, width).transpose(1, 2), random(1, 3, 2, width).transpose(1, 2)
    cos, sin = random(1, 3, width), random(1, 3, width)
    if not _fits(q, k, cos, sin):
        return False

    def flat(both: Any) -> torch.Tensor:
        return torch.cat([one.flatten() for one in both])

    reason = triton_support.why_wrong(
        lambda: flat(rotated(own, q, k, cos, sin)),
        lambda: flat(own(q, k, cos, sin)),  # which may take something else
        TOLERANCE.get(like.dtype, 0.0),
        "the kernel",
    )
    if reason:
        logger.info("%s: %s", own.__module__, reason)
    return not reason


def _fits(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """Return whether the kernel takes these: one row of tokens, [1, heads, T, D], turned in their full width."""
    width = q.shape[-1]
    return (
        (q.dim(), k.dim(), cos.dim()) == (4, 4, 3)
        and q.shape[0] == k.shape[0] == cos.shape[0] == 1
        and cos.shape == sin.shape == (1, q.shape[2], width)
        and k.shape[2:] == q.shape[2:]
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and width % 2 == 0
        and q.stride(-1) == k.stride(-1) == 1
    )


def rotated(own: Callable[..., Any], q: Any, k: Any, cos: Any, sin: Any, *args: Any, **options: Any) -> Any:
    """Return queries and keys [1, heads, T, D] rotated by ``cos`` and ``sin`` [1, T, D]; others as ``own`` does."""
    from . import kernels

    if args or options or not _fits(q, k, cos, sin):
        return own(q, k, cos, sin, *args, **options)
    (H, T, D), Hkv = q.shape[1:], k.shape[1]
    found = [torch.empty(1, T, heads, D, dtype=q.dtype, device=q.device) for heads in (H, Hkv)]
    parts = -(-H // HEADS) - (-Hkv // HEADS)
    kernels.rotate[(T, parts)](
        q, k, cos.contiguous(), sin.contiguous(), *found, q.stride(1), q.stride(2), k.stride(1), k.stride(2),
        H=H, HKV=Hkv, HALF=D // 2, HALF_PADDED=1 << (D // 2 - 1).bit_length(), HEADS=HEADS,
    )  # fmt: skip
    return tuple(one.transpose(1, 2) for one in found)
