"""Calls that a CUDA graph cannot record: those that wait for a value, or copy one from the host.

Without a device, both happen unseen. ``HostReads`` notes the calls of torch that do either on a device."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READING = {  # methods that bring values to the host
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
}
MAKING = {torch.tensor, torch.as_tensor, torch.from_numpy}  # their values begin on the host
SIZED_BY_VALUES = {  # operations whose result's shape follows from values, which the host waits for
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::equal",
    "aten::_grouped_mm",  # instead of which transformers, for float32 on CUDA, reads where each group begins
    "transformers::grouped_mm_fallback",
}


class HostReads:
    """A context in which calls that read values to the host, or bring new ones from it, are noted in ``found``."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        with _Functions(self), _Operations(self):
            yield

    def note(self, name: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
        at = next((f for f in reversed(frames) if f.filename != __file__ and "contextlib" not in f.filename), None)
        self.found.append(name if at is None else f"{name} in {at.filename.rpartition('/')[2]}:{at.lineno}")


class _Functions(TorchFunctionMode):
    def __init__(self, owner: HostReads) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in MAKING or function in READING:
            self.owner.note(function.__name__)
        return function(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, owner: HostReads) -> None:
        super().__init__()
        self.owner = owner

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, _, overload = function.name().partition(".")
        is_counted = name == "aten::repeat_interleave" and overload != "self_int"
        if is_counted or name in SIZED_BY_VALUES or (name.startswith("aten::index") and _has_mask(args)):
            self.owner.note(name)
        return function(*args, **(kwargs or {}))


def _has_mask(args: Any) -> bool:
    """Return whether an indexing operation is given a mask, whose true elements must be counted first."""
    indexes = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indexes)
