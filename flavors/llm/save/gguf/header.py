"""Read the keys and the tensor names of a GGUF file, and refuse a key by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from .....serving.interface.errors import PackagingError, reason, shown


class Header(Struct, frozen=True, kw_only=True):
    """The keys of a GGUF file with their values, the shapes of its tensors in torch's order, and the values of the
    small tensors that are part of no layer (``rope_…``)."""

    file: str
    values: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    factors: dict[str, list[float]] = {}

    @property
    def architecture(self) -> str:
        """Return ``general.architecture``, which is also the prefix of the keys that describe the model."""
        return str(self.values.get("general.architecture"))

    def own(self) -> dict[str, Any]:
        """Return the keys that describe the model, without their prefix."""
        prefix = f"{self.architecture}."
        return {key[len(prefix) :]: value for key, value in self.values.items() if key.startswith(prefix)}

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key that describes the model, given without its prefix."""
        return self.values.get(f"{self.architecture}.{name}", default)

    def required(self, name: str) -> Any:
        """Return the value of a key that describes the model. Raises ``PackagingError`` if it is absent."""
        if (value := self.get(name)) is None:
            raise PackagingError(f"model: {self.file} lacks {self.architecture}.{name}")
        return value

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raise ``PackagingError`` for the value of a key that describes the model, given without its prefix."""
        self.refuse_key(f"{self.architecture}.{name}", expected)

    def refuse_key(self, key: str, expected: str) -> NoReturn:
        """Raise ``PackagingError`` for the value of ``key``."""
        raise PackagingError(
            f"model: {self.file}: {key} = {shown(self.values.get(key))} is not supported for a GGUF file of the"
            f" architecture {shown(self.architecture)}; expected {expected}"
        )


def read_header(file: Path) -> Header:
    """Read the keys and tensor names of ``file``. Raises ``PackagingError`` if it is damaged or names no
    architecture."""
    from gguf import GGUFReader, dequantize

    try:
        reader = GGUFReader(file)
        values = {key: _value(field) for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        tensors = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
        factors = {t.name: dequantize(t.data, t.tensor_type).ravel().tolist() for t in reader.tensors if _small(t.name)}
    except Exception as error:  # gguf's reader may raise anything for a damaged file
        raise PackagingError(f"model: {file.name} cannot be read: {reason(error)}") from None
    header = Header(file=file.name, values=values, tensors=tensors, factors=factors)
    if not isinstance(values.get("general.architecture"), str):
        raise PackagingError(f"model: {file.name} lacks general.architecture")
    return header


def _small(name: str) -> bool:
    return name.startswith("rope_")


def _value(field: Any) -> Any:
    from gguf import GGUFValueType

    if not field.types:
        return None
    element = field.types[-1]

    def decoded(part: Any) -> Any:
        return bytes(part).decode("utf-8", "replace") if element == GGUFValueType.STRING else part[0].item()

    parts = [decoded(field.parts[index]) for index in field.data]
    return parts if field.types[0] == GGUFValueType.ARRAY else parts[0]
