"""Decode the HTTP body of an inference request of KServe's protocol (v2), and encode that of the response.

A body is JSON, or JSON followed by the bytes of the tensors that have ``binary_data_size``, in the order of
``inputs``; ``Inference-Header-Content-Length`` is then the length of the JSON. A body may have tensors of both kinds.
Source of the format: the Open Inference Protocol and its binary tensor data extension.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...interface.errors import InvalidField
from ...interface.readers import boolean, obj, string
from ..base import JSON, Encoded
from ..fields.fields import unknown_field
from ..json_body import json_bytes, read_object
from .tensors import Tensor, from_bytes, from_json, read_datatype, read_shape, to_bytes, to_list

HEADER_LENGTH = "Inference-Header-Content-Length"
BINARY = "application/octet-stream"
MAX_TENSORS = 64
MAX_ID = 1024  # characters
_SHARED_MEMORY = re.compile("shared_memory_(region|byte_size|offset)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedOutput:
    """A tensor that the response must have. If ``binary`` is None, the request's setting for all tensors applies."""

    name: str
    binary: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InferCall:
    """A request for inference, over HTTP or gRPC. ``outputs`` () asks for all available outputs."""

    id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: tuple[RequestedOutput, ...] = ()


def read_call(body: bytes, header_length: str | None) -> InferCall:
    """Return the call in ``body``. Raises ``InvalidField`` for wrong lengths, for tensors that do not match their own
    description, and for unknown fields."""
    size = len(body) if header_length is None else _length(header_length, len(body))
    call, rest = read_object(body[:size], lambda found: _Reading(found, memoryview(body)[size:]).call())
    if rest:
        raise InvalidField("inputs", f"{rest} bytes after the tensors", "none: binary_data_size counts them all")
    return call


def _length(header: str, maximum: int) -> int:
    if not re.fullmatch("[0-9]{1,18}", header) or int(header) > maximum:
        raise InvalidField(HEADER_LENGTH, header[:40], f"the bytes of the JSON, at most the body's {maximum}")
    return int(header)


class _Reading:
    """The reading of a call; the bytes of tensors are taken from the front of ``data``."""

    def __init__(self, found: dict[str, Any], data: memoryview) -> None:
        self._found = found
        self._data = data

    def call(self) -> tuple[InferCall, int]:
        """Return the call, and how many bytes are left."""
        known = ("id", "parameters", "inputs", "outputs")
        for name, value in self._found.items():
            if name not in known:
                raise unknown_field(name, value, known)
        parameters = self._parameters(self._found.get("parameters"), "parameters")
        inputs = [self._input(entry, f"inputs[{i}]") for i, entry in enumerate(self._list("inputs"))]
        if not inputs:
            raise InvalidField("inputs", [], "a list of tensors")
        outputs = tuple(_output(entry, f"outputs[{i}]") for i, entry in enumerate(self._list("outputs")))
        return InferCall(
            id=read_id(self._found.get("id"), "id"), parameters=parameters, inputs=by_name(inputs), outputs=outputs
        ), len(self._data)

    def _list(self, name: str) -> list[Any]:
        value = self._found.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > MAX_TENSORS:
            raise InvalidField(name, value, f"a list of at most {MAX_TENSORS} tensors")
        return value

    @staticmethod
    def _parameters(value: Any, path: str) -> dict[str, Any]:
        return {} if value is None else {name: one for name, one in obj(value, path).items() if one is not None}

    def _input(self, entry: Any, path: str) -> Tensor:
        known = ("name", "shape", "datatype", "parameters", "data")
        for name, value in obj(entry, path).items():
            if name not in known:
                raise unknown_field(name, value, known, f"{path}.")
        name = string(entry.get("name"), f"{path}.name")
        datatype = read_datatype(entry.get("datatype"), f"{path}.datatype")
        shape = read_shape(entry.get("shape"), f"{path}.shape")
        parameters = self._parameters(entry.get("parameters"), f"{path}.parameters")
        size = parameters.pop("binary_data_size", None)
        check_parameters(parameters, f"{path}.parameters", ("binary_data_size",))
        if size is None:
            return from_json(name, datatype, shape, entry.get("data"), f"inputs[{name}].data")
        where = f"inputs[{name}].parameters.binary_data_size"
        if entry.get("data") is not None:
            raise InvalidField(f"inputs[{name}].data", "values", "null beside binary_data_size")
        if type(size) is not int or not 0 <= size <= len(self._data):
            raise InvalidField(where, size, f"bytes after the JSON, of which {len(self._data)} are left")
        data, self._data = bytes(self._data[:size]), self._data[size:]
        return from_bytes(name, datatype, shape, data, where)


def read_id(value: Any, path: str) -> str:
    """Read a request's id; "" if it has none."""
    if value is None:
        return ""
    if len(string(value, path)) > MAX_ID:
        raise InvalidField(path, value, f"at most {MAX_ID} characters")
    return str(value)


def by_name(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the tensors by name. Raises ``InvalidField`` if two have the same name."""
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.name in found:
            raise InvalidField(tensor.name, "two tensors", "one of a name")
        found[tensor.name] = tensor
    return found


def check_parameters(parameters: Mapping[str, Any], path: str, known: tuple[str, ...] = ()) -> None:
    """Raise ``InvalidField`` for parameters of a tensor that are unknown or ask for something unsupported."""
    for name, value in parameters.items():
        if _SHARED_MEMORY.fullmatch(name):
            raise InvalidField(f"{path}.{name}", value, "null: shared memory is not supported")
        if name == "classification":
            if value != 0 or isinstance(value, bool):
                raise InvalidField(f"{path}.{name}", value, "0: a text has no classes")
            continue
        raise unknown_field(name, value, known, f"{path}.")


def _output(entry: Any, path: str) -> RequestedOutput:
    known = ("name", "parameters")
    for name, value in obj(entry, path).items():
        if name not in known:
            raise unknown_field(name, value, known, f"{path}.")
    given = entry.get("parameters")
    parameters = {} if given is None else {n: v for n, v in obj(given, f"{path}.parameters").items() if v is not None}
    binary = parameters.pop("binary_data", None)
    check_parameters(parameters, f"{path}.parameters", ("binary_data",))
    return RequestedOutput(
        name=string(entry.get("name"), f"{path}.name"),
        binary=None if binary is None else boolean(binary, f"{path}.parameters.binary_data"),
    )


def encoded(head: Mapping[str, Any], tensors: Iterable[tuple[Tensor, bool]]) -> Encoded:
    """Encode a response of ``head`` and tensors, each with whether its values are sent as binary."""
    outputs: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for tensor, binary in tensors:
        said: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if binary:
            parts.append(to_bytes(tensor))
            said["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            said["data"] = to_list(tensor)
        outputs.append(said)
    written = json_bytes({**head, "outputs": outputs})
    if not parts:
        return Encoded(body=written, content_type=JSON)
    return Encoded(body=b"".join((written, *parts)), content_type=BINARY, headers={HEADER_LENGTH: str(len(written))})
