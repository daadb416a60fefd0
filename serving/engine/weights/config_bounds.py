"""Bounds on what a model's configuration may ask for, relative to its weights.

A configuration that asks for a million layers, or for terabytes of parameters, beside a small file of weights is
refused before the model is built::

    with in_proportion(model_dir):
        AutoModelForCausalLM.from_pretrained(model_dir, ...)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from ...interface.errors import PackagingError, shown

# While transformers loads a model it removes ``tie_weights`` from the base class of all models. A model that another
# thread builds meanwhile has an output head of random numbers, and can leave all later models in the same state.
BUILDING = threading.RLock()
# A process forked meanwhile would have the class without the method and this lock held by nobody, so a fork waits.
os.register_at_fork(before=BUILDING.acquire, after_in_parent=BUILDING.release, after_in_child=BUILDING.release)
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
MAX_CONFIG_BYTES = 16 << 20
MAX_MODULES = 500_000  # the largest open models have 100,000
BYTE_TYPES = ("I8", "U8", "F8", "F4")
# Numbers from which a configuration's own code makes lists of that length.
COUNTS = re.compile(r"(^|_)(n|num)_(.*_)?(layers?|blocks?|stages?|experts?)$|^(depth|layers)$")
# Experts are often rows of one tensor, and a default that a model without experts does not use (Doge: 16,384).
EXPERTS = re.compile(r"experts?$")
MAX_EXPERTS = 65_536


class Stored(Struct, frozen=True):
    """The number of tensors that are stored, and how many elements they have together."""

    tensors: int
    elements: int

    @property
    def max_modules(self) -> int:
        """Bound on modules and parameters. Every layer has weights, but activations, norms and containers may have
        none."""
        return min(MAX_MODULES, 2000 + 32 * self.tensors)

    @property
    def max_elements(self) -> int:
        """Bound on parameters' elements. Tied weights count twice, and masks and positions may be created."""
        return 200_000_000 + 8 * self.elements


def read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes by key from the header of a safetensors file, without the weights.

    The header is 8 bytes of little-endian length, then JSON. Raises ``PackagingError``, which names the file.
    """
    return {key: shape for key, (_, shape) in _entries(file).items()}


def _entries(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and the shape by key. Raises what ``read_header`` raises."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        return {k: (str(v["dtype"]), _shape(v["shape"])) for k, v in header.items() if k != "__metadata__"}
    except (OSError, ValueError, RecursionError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise PackagingError(f"{file.name} cannot be read as safetensors: {error}") from None


def refuse_unscaled(folder: str | Path) -> None:
    """Refuse weights in one-byte types of a model whose config.json has no quantisation: read as floats they would be
    wrong by their scales. Raises ``PackagingError``, which names one of them."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        for key, (dtype, _) in _entries(file).items():
            if key.endswith("weight") and dtype.startswith(BYTE_TYPES):
                raise PackagingError(
                    f"{key} is stored as {dtype}, but config.json has no quantization_config that says how it is scaled"
                )


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError(f"a tensor of shape {shown(value)}")
    return tuple(value)


def stored(folder: Path) -> Stored:
    """Count what the safetensors files in ``folder`` hold, by their headers."""
    shapes = [shape for file in sorted(folder.glob("*.safetensors")) for shape in read_header(file).values()]
    return Stored(len(shapes), sum(map(math.prod, shapes)))


@contextlib.contextmanager
def in_proportion(folder: str | Path) -> Iterator[None]:
    """Bound what this thread builds within the block by the weights in ``folder``. Only one thread builds at a time.

    Build on torch's meta device, or by ``from_pretrained``, so that tensors get their memory only afterwards. Raises
    ``PackagingError``.
    """
    from torch.nn.modules import module as nn

    there = stored(Path(folder))
    check_config(Path(folder) / "config.json", there)
    me, modules, elements = threading.get_ident(), 0, 0

    def count_module(parent: Any, name: str, child: Any) -> None:
        nonlocal modules
        if threading.get_ident() == me:
            modules += 1
            if modules > there.max_modules:
                raise _out_of_proportion(f"more than {there.max_modules} modules", there)

    def count_tensor(parent: Any, name: str, tensor: Any) -> None:
        nonlocal elements
        if threading.get_ident() == me and tensor is not None:
            count_module(parent, name, tensor)
            elements += tensor.numel()
            if elements > there.max_elements:
                raise _out_of_proportion(f"{elements} parameters", there)

    with BUILDING:
        hooks = (
            nn.register_module_module_registration_hook(count_module),
            nn.register_module_parameter_registration_hook(count_tensor),
            nn.register_module_buffer_registration_hook(count_tensor),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def check_config(file: Path, there: Stored) -> None:
    """Refuse a configuration whose numbers would make its own code build overlong lists. Raises ``PackagingError``."""
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise PackagingError(f"{file.name}: more than {MAX_CONFIG_BYTES} bytes")
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        return  # building the model will report it
    except PackagingError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise PackagingError(f"{file.name} cannot be read: {error}") from None
    for name, value in _numbers(config, ""):
        maximum = max(MAX_EXPERTS, there.max_modules) if EXPERTS.search(name) else there.max_modules
        if COUNTS.search(name.rpartition(".")[2]) and value > maximum:
            raise PackagingError(
                f"{file.name}: {name}: {shown(value)} is not allowed; expected at most {maximum} with"
                f" {there.tensors} tensors of weights"
            )


def _numbers(value: Any, path: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _numbers(entry, f"{path}.{key}" if path else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def _out_of_proportion(what: str, there: Stored) -> PackagingError:
    return PackagingError(
        f"config.json asks for {what}, but the weights have {there.tensors} tensors with {there.elements} numbers"
    )
