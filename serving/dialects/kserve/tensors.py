"""Tensors of KServe's inference protocol (v2): datatypes, and conversion of values from and to JSON and bytes.

Bytes are little-endian and row-major, without padding; an element of a BYTES tensor is its length (uint32) and that
many bytes. Values are stored flat, in an array or a tuple of byte strings. BF16 becomes float32, which represents it
exactly. Source of the format: the Open Inference Protocol and its binary tensor data extension.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

from ...interface.errors import InvalidField
from ...system.imports import Lazy

if TYPE_CHECKING:
    import numpy as np
else:
    np = Lazy("numpy")

MAX_DIMS = 8
MAX_ELEMENTS = 2**31 - 1
BYTES, BOOL, BF16 = "BYTES", "BOOL", "BF16"
INTEGERS = {  # with numpy's names
    f"{prefix}INT{bits}": f"<{kind}{bits // 8}" for prefix, kind in (("", "i"), ("U", "u")) for bits in (8, 16, 32, 64)
}
FLOATS = {"FP16": "<f2", BF16: "<f4", "FP32": "<f4", "FP64": "<f8"}
DTYPES = {BOOL: "?", **INTEGERS, **FLOATS}
ITEM_SIZES = {name: int(dtype[2:] or 1) for name, dtype in DTYPES.items()} | {BF16: 2}
DATATYPES = (*DTYPES, BYTES)

Values: TypeAlias = "np.ndarray[Any, Any] | tuple[bytes, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor. ``values`` are flat, in row-major order; ``shape`` has their dimensions."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Values

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """The flat values of a tensor that is not of BYTES."""
        assert isinstance(self.values, np.ndarray)
        return self.values

    @property
    def texts(self) -> tuple[bytes, ...]:
        """The elements of a tensor of BYTES."""
        assert isinstance(self.values, tuple)
        return self.values


def read_datatype(value: Any, path: str) -> str:
    """Read one of ``DATATYPES``. Raises ``InvalidField``."""
    if not isinstance(value, str) or value not in DATATYPES:
        raise InvalidField(path, value, "one of " + ", ".join(DATATYPES))
    return value


def read_shape(value: Any, path: str) -> tuple[int, ...]:
    """Read up to ``MAX_DIMS`` sizes. Raises ``InvalidField``."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > MAX_DIMS:
        raise InvalidField(path, value, f"a list of at most {MAX_DIMS} sizes")
    if not all(type(size) is int and size >= 0 for size in value) or math.prod(value) > MAX_ELEMENTS:
        raise InvalidField(path, value, f"sizes of 0 and above, of at most {MAX_ELEMENTS} elements together")
    return tuple(value)


def from_bytes(name: str, datatype: str, shape: tuple[int, ...], data: bytes, path: str) -> Tensor:
    """Return a tensor with the values in ``data``. Raises ``InvalidField`` if they do not match shape and datatype."""
    count = math.prod(shape)
    if datatype == BYTES:
        return Tensor(name=name, datatype=datatype, shape=shape, values=tuple(_elements(data, count, path)))
    size = count * ITEM_SIZES[datatype]
    if len(data) != size:
        raise InvalidField(path, f"{len(data)} bytes", f"{size}: shape {list(shape)} of {datatype}")
    if datatype == BF16:
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    elif datatype == BOOL:
        raw = np.frombuffer(data, np.uint8)
        if raw.size and raw.max() > 1:
            raise InvalidField(path, int(raw.max()), "0 and 1 for the elements of a BOOL")
        values = raw.view(np.bool_)
    else:
        values = np.frombuffer(data, DTYPES[datatype])
    return Tensor(name=name, datatype=datatype, shape=shape, values=values)


def _elements(data: bytes, count: int, path: str) -> Iterable[bytes]:
    """Yield ``count`` byte strings; in ``data`` each follows its length."""
    place = 0
    for number in range(count):
        if place + 4 > len(data):
            raise InvalidField(path, f"{len(data)} bytes", f"{count} elements of BYTES, each its length and its bytes")
        (length,) = struct.unpack_from("<I", data, place)
        place += 4 + length
        if place > len(data):
            raise InvalidField(path, f"a length of {length} for element {number}", f"at most the {len(data)} bytes")
        yield data[place - length : place]
    if place != len(data):
        raise InvalidField(path, f"{len(data)} bytes", f"{place}: {count} elements of BYTES")


def from_json(name: str, datatype: str, shape: tuple[int, ...], data: Any, path: str) -> Tensor:
    """Return a tensor with the values in a list, flat or nested as ``shape`` says. Raises ``InvalidField``."""
    flat = _flat(data, shape, path)
    values = _texts(flat, path) if datatype == BYTES else _numbers(flat, datatype, path)
    return Tensor(name=name, datatype=datatype, shape=shape, values=values)


def _flat(data: Any, shape: tuple[int, ...], path: str) -> list[Any]:
    if not isinstance(data, list):
        raise InvalidField(path, data, "a list")
    level, nested = data, any(isinstance(entry, list) for entry in data)
    for depth, size in enumerate(shape if nested else ()):
        if len(level) != math.prod(shape[: depth + 1]):
            break
        if depth == len(shape) - 1:
            return level
        following = shape[depth + 1]
        if not all(isinstance(entry, list) and len(entry) == following for entry in level):
            break
        level = list(chain.from_iterable(level))
        assert size >= 0
    if nested or len(data) != math.prod(shape):
        got = "nested lists" if nested else f"{len(data)} elements"
        raise InvalidField(path, got, f"{math.prod(shape)} elements, flat or nested as shape {list(shape)}")
    return data


def _texts(flat: list[Any], path: str) -> tuple[bytes, ...]:
    for place, entry in enumerate(flat):
        if not isinstance(entry, str):
            raise InvalidField(f"{path}[{place}]", entry, "a string")
    try:
        return tuple(entry.encode() for entry in flat)
    except UnicodeEncodeError:
        raise InvalidField(path, "half a surrogate pair", "valid Unicode text") from None


def _numbers(flat: list[Any], datatype: str, path: str) -> np.ndarray[Any, Any]:
    dtype = DTYPES[datatype]
    if datatype == BOOL:
        kinds: tuple[type, ...] = (bool,)
    else:
        kinds = (int,) if datatype in INTEGERS else (int, float)
    for place, entry in enumerate(flat):
        if type(entry) not in kinds:
            raise InvalidField(f"{path}[{place}]", entry, f"a value of {datatype}")
    if datatype in INTEGERS and flat:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        for found in (min(flat), max(flat)):
            if not low <= found <= high:
                raise InvalidField(path, found, f"values of {datatype}, in [{low}, {high}]")
    with np.errstate(over="ignore"):
        try:
            values = np.array(flat, dtype=dtype)
        except OverflowError:  # an integer that is too large for a float
            values = np.array([_float(entry) for entry in flat], dtype=dtype)
    if datatype in FLOATS and not (finite := np.isfinite(values)).all():
        place = int(np.flatnonzero(~finite)[0])
        raise InvalidField(f"{path}[{place}]", flat[place], f"a finite value of {datatype}")
    return values


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def to_bytes(tensor: Tensor) -> bytes:
    """Return the values as the bytes that follow a body's JSON. Not for BF16, which no response has."""
    if isinstance(tensor.values, tuple):
        return b"".join(struct.pack("<I", len(entry)) + entry for entry in tensor.values)
    return tensor.values.tobytes()


def to_list(tensor: Tensor) -> list[Any]:
    """Return the values as a flat list for JSON, which has no infinity: it becomes the largest number of the type."""
    if isinstance(tensor.values, tuple):
        return [entry.decode(errors="replace") for entry in tensor.values]
    values = tensor.values
    if tensor.datatype in FLOATS:
        values = np.nan_to_num(values)
    found: list[Any] = values.tolist()
    return found
