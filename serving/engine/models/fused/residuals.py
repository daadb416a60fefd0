"""Adds residuals in the kernel of the norm that follows, in decoder layers of the usual form.

::

    x ── input_layernorm ── self_attn ── + ── post_attention_layernorm ── mlp ── + ── the next layer's input_layernorm,
    └────────────────────────────────────┘ └───────────────────────────────────┘      or the model's norm

The kernel that adds also leaves the normed sum with the norm, which returns it, once, when it is called with that very
sum. Called with another tensor, the norm computes as usual, so a layer followed by something else is slower but never
wrong.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ...devices import overlap
from ...weights import fp8_inputs
from ...weights.fp8 import Fp8Weight

logger = logging.getLogger(__name__)
PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
FINAL = ("norm", "final_layernorm")  # as models name the norm after their last layer
TOLERANCE = {torch.float32: 1e-5}  # relative to the example's largest value; 0.02 for 16-bit types
NORMED = "_engine_normed"  # attribute of a norm: a sum, and the normed sum


def install(model: nn.Module) -> int:
    """Replace the code of layers that prove to be of this form and whose norms use kernels; return how many."""
    count, left = 0, set()
    for layer, following in _layers(model):
        forward = partial(_forward, layer, layer.forward, _defaults(layer), following)
        if why_not := _why_not(layer, forward, following):
            left.add(f"{type(layer).__name__}: {why_not}")
        else:
            object.__setattr__(layer, "forward", forward)
            count += 1
    for line in sorted(left):
        logger.info("residuals are added by torch in %s", line)
    return count


def normed(norm: Any, x: Any) -> Any:
    """Take the result left with ``norm`` if it is that of the very tensor ``x``; else None. Nothing stays there."""
    known = norm.__dict__.pop(NORMED, None)
    return known[1] if known is not None and known[0] is x else None


def add(x: torch.Tensor, more: torch.Tensor, norm: Any) -> torch.Tensor:
    """Add x + more [..., N]. If there is a ``norm``, its result is left with it."""
    from . import kernels

    if norm is None or x.shape != more.shape or x.dtype != more.dtype:
        return x + more
    x, more, weight = x.contiguous(), more.contiguous(), norm.weight
    size = x.shape[-1]
    total = torch.empty_like(x)
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    padded = 1 << (size - 1).bit_length()
    made = fp8_inputs.buffers(norm, out, Fp8Weight.few)
    kernels.add_rms_norm[(x.numel() // size,)](
        x, more, weight, total, out, made.q, made.scale, norm.variance_epsilon,
        N=size, PADDED=padded, QUANTIZE=made.are_written, **overlap.options(x.device),
    )  # fmt: skip
    norm.__dict__[NORMED] = (total, fp8_inputs.offer(norm, out, made))
    return total


def _layers(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the layers that have the parts, each with the norm that follows it, or None if no kernel computes that."""
    for path, found in model.named_modules():
        if not isinstance(found, nn.ModuleList):
            continue
        parent, layers = model.get_submodule(path.rpartition(".")[0]), list(found)
        final = next((getattr(parent, name) for name in FINAL if hasattr(parent, name)), None)
        norms = [*(getattr(layer, "input_layernorm", None) for layer in layers[1:]), final]
        for layer, norm in zip(layers, norms, strict=True):
            parts = [getattr(layer, part, None) for part in PARTS]
            if all(isinstance(part, nn.Module) for part in parts) and all(map(_by_kernel, parts[2:])):
                yield layer, norm if _by_kernel(norm) else None


def _by_kernel(norm: Any) -> bool:
    """Return whether ``modules`` has replaced the norm's code."""
    return isinstance(norm, nn.Module) and "forward" in norm.__dict__ and hasattr(norm, "variance_epsilon")


def _defaults(layer: Any) -> dict[str, Any]:
    """Return the default arguments that a layer passes on to its attention."""
    parameters = inspect.signature(layer.forward).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def _forward(
    layer: Any, own: Callable[..., Any], defaults: dict[str, Any], following: Any, x: Any, *unnamed: Any, **named: Any
) -> Any:
    if unnamed:
        return own(x, *unnamed, **named)
    attended = layer.self_attn(hidden_states=layer.input_layernorm(x), **(defaults | named))[0]
    x = add(x, attended, layer.post_attention_layernorm)
    return add(x, layer.mlp(layer.post_attention_layernorm(x)), following)


class _Attention(nn.Module):
    """A stand-in for a layer's attention, which needs more than an example has; notes its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[dict[str, Any]] = []

    def forward(self, hidden_states: Any, **named: Any) -> tuple[Any, None]:
        self.given.append(named)
        return hidden_states.roll(1, -1) * 0.7, None


def _why_not(layer: Any, forward: Callable[[Any], Any], following: Any) -> str:
    """Return why a layer's code is not replaced; empty if ``forward`` agrees with the layer's own code on an
    example."""
    weight = layer.input_layernorm.weight
    make = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, len(weight), generator=make).to(weight.device, weight.dtype)
    attention, layer.self_attn = layer.self_attn, _Attention()
    try:
        pairs = [(forward(x), layer.forward(x))]
        if following is not None:
            pairs.append((following(pairs[0][0]), following(pairs[0][1])))
        same = layer.self_attn.given[0] == layer.self_attn.given[1]
        far = [float((found - wanted).abs().max() / wanted.abs().max()) for found, wanted in pairs]
    except Exception as error:  # from code of another form, Triton's compiler, or the driver
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        layer.self_attn = attention
        for norm in (layer.post_attention_layernorm, following):
            if norm is not None:
                norm.__dict__.pop(NORMED, None)
    near = all(one <= TOLERANCE.get(weight.dtype, 0.02) for one in far)  # NaN is not
    return "" if same and near else "it has another form"
