"""Computes rotary embeddings of queries and keys by one kernel of ours instead of ten of torch's.

transformers' attention modules call a function of their file, ``apply_rotary_pos_emb(q, k, cos, sin)``. A module whose
function proves to rotate halves runs the same code with that one name bound to ours, which calls the model's own for
arguments of any other form.

A module that hands the rotated queries and keys to its attention as they are, which most do, leaves them to the
attention: a plan over KV blocks rotates them and writes keys and values in one launch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ...attention.attention import HOLDER
from ...attention.rotation import Rotation, fits
from ...devices import triton_support
from ...weights.forward_context import ContextHolder, ForwardContext

logger = logging.getLogger(__name__)
NAME = "apply_rotary_pos_emb"
RENAMED = "transformers.utils.deprecation"  # the module whose wrappers take arguments by their former names
# Relative to the example's largest value. In 16 bits the kernel rounds where torch does (``rotation.UNFUSED``); a
# compiler that fuses a product with the sum all the same rounds once less, which may change a result's last bit.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def install(model: nn.Module) -> int:
    """Bind the kernel in the attention modules for which it is right; return how many (0 if the device runs none)."""
    like = next(model.parameters())
    if not triton_support.enabled(like.device):
        return 0
    known: dict[tuple[type, int], str] = {}
    count = 0
    for module in model.modules():
        width = getattr(module, "head_dim", None)
        if getattr(module, "layer_idx", None) is None or not isinstance(width, int) or not _rotates(type(module)):
            continue
        key = type(module), width
        if key not in known:
            known[key] = _why_not(type(module), width, like)
        if not known[key]:
            _bind(module, like)
            count += 1
    for (kind, _), reason in known.items():
        if reason:
            logger.warning("torch, not our kernel, computes the rotary embeddings of %s: %s", kind.__name__, reason)
    return count


def _rotates(kind: type) -> bool:
    """Return whether a class's own code calls a function of that name."""
    forward = _own_forward(kind)
    return NAME in getattr(forward, "__globals__", {}) and NAME in forward.__code__.co_names


def _own_forward(kind: type) -> Any:
    """Return a class's forward without transformers' wrappers for former names of arguments.

    Layers of the same release call it by the new names.
    """
    forward: Any = getattr(kind, "forward", None)
    while getattr(forward, "__globals__", {}).get("__name__") == RENAMED and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


def _bind(module: Any, like: torch.Tensor) -> None:
    """Give a module its own code with our function in it, which leaves the rotation to the attention if it may."""
    holder: ContextHolder | None = getattr(module, HOLDER, None)
    forward = _with(rotated, type(module))
    if holder is not None:
        later = _with(partial(rotated_later, holder), type(module))
        if not (reason := _why_not_later(module, forward, later, holder, like)):
            forward = later
        else:
            logger.info("%s rotates before its attention: %s", type(module).__name__, reason)
    object.__setattr__(module, "forward", MethodType(forward, module))


def _with(function: Callable[..., Any], kind: type) -> Any:
    """Return the class's forward with ``function``, which is given the class's own, bound to the name."""
    forward = _own_forward(kind)
    names = forward.__globals__ | {NAME: partial(function, forward.__globals__[NAME])}
    bound = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    bound.__kwdefaults__ = forward.__kwdefaults__
    return bound


def _why_not(kind: type, width: int, like: torch.Tensor) -> str:
    """Return why our function does not take the place of a class's; "" if it computes the same."""
    forward = _own_forward(kind)
    own = forward.__globals__[NAME]
    q, k, cos, sin = _example(width, like)
    if not fits(q, k, cos, sin):
        return f"its heads are {width} wide"

    def flat(both: Any) -> torch.Tensor:
        return torch.cat([one.flatten() for one in both])

    try:
        wanted = flat(own(q, k, cos, sin))
    except Exception as error:  # of a function that takes something else
        return f"its {NAME} has another form: {' '.join(str(error).split())[:300]}"
    found = partial(rotated, own, q, k, cos, sin)
    return triton_support.why_wrong(lambda: flat(found()), lambda: wanted, TOLERANCE.get(like.dtype, 0.0), "the kernel")


def _example(width: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    make = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=make).to(like.device, like.dtype)

    q, k = random(1, 3, 5, width).transpose(1, 2), random(1, 3, 2, width).transpose(1, 2)
    return q, k, random(1, 3, width), random(1, 3, width)


class _Noting:
    """A stand-in for a step's attention that notes the queries and keys it is given."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def attend(self, layer: int, q: Any, k: Any, v: Any, args: Any) -> Any:
        self.given += [q, k]
        return q.new_zeros((1, q.shape[2], q.shape[1], v.shape[-1]))

    def attend_rotated(self, layer: int, rotation: Rotation, v: Any, args: Any) -> Any:
        return self.attend(layer, *rotation.apply(), v, args)


def _why_not_later(module: Any, now: Any, later: Any, holder: ContextHolder, like: torch.Tensor) -> str:
    """Return why a module may not leave the rotation to its attention; "" if that gets the same from both forwards."""
    x = torch.randn(1, 3, _input_width(module), generator=torch.Generator().manual_seed(1)).to(like.device, like.dtype)
    *_, cos, sin = _example(module.head_dim, like)
    found = []
    try:
        for forward in (now, later):
            plan = _Noting()
            holder.context = ForwardContext(num_tokens=3, attention=plan)
            forward(module, hidden_states=x, position_embeddings=(cos, sin), attention_mask=None)
            if holder.context.rotation is not None:
                return "it does not attend by what it rotates"
            found.append(plan.given)
    except Exception as error:  # from code of another form
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        holder.context = None
    same = len(found[0]) == len(found[1]) == 2 and all(map(torch.equal, *found))
    return "" if same else "its attention gets something else"


def _input_width(module: Any) -> int:
    projection = getattr(module, "q_proj", None)
    return int(projection.in_features if isinstance(projection, nn.Linear) else module.config.hidden_size)


def rotated(own: Callable[..., Any], q: Any, k: Any, cos: Any, sin: Any, *args: Any, **options: Any) -> Any:
    """Return queries and keys [1, heads, T, D] rotated by ``cos`` and ``sin`` [1, T, D]; others as ``own`` does."""
    if args or options or not fits(q, k, cos, sin):
        return own(q, k, cos, sin, *args, **options)
    return Rotation(q, k, cos, sin).apply()


def rotated_later(
    holder: ContextHolder, own: Callable[..., Any], q: Any, k: Any, cos: Any, sin: Any, *args: Any, **options: Any
) -> Any:
    """Do the same, but return queries and keys as they are if this step's attention will rotate them."""
    context = holder.context
    if args or options or context is None or not hasattr(context.attention, "attend_rotated"):
        return rotated(own, q, k, cos, sin, *args, **options)
    if not fits(q, k, cos, sin):
        return own(q, k, cos, sin)
    context.rotation = Rotation(q, k, cos, sin)
    return q, k
