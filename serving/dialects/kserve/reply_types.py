"""The objects of KServe's protocol (v2), as types: the OpenAPI document has their schemas."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from ..base import JSON, Exchange
from .body import BINARY


class BinaryTensor(TypedDict):
    binary_data_size: int


class InferOutput(TypedDict):
    """A tensor; its values are in ``data``, flat, or among the bytes after the JSON."""

    name: str
    datatype: str
    shape: list[int]
    data: NotRequired[list[Any]]
    parameters: NotRequired[BinaryTensor]


class InferReply(TypedDict):
    id: NotRequired[str]
    model_name: str
    model_version: str
    outputs: list[InferOutput]


class ServerLive(TypedDict):
    live: Literal[True]


class ServerReady(TypedDict):
    ready: bool


class ServerMetadata(TypedDict):
    name: str
    version: str
    extensions: list[str]


class ModelReady(TypedDict):
    name: str
    ready: Literal[True]


class TensorMetadata(TypedDict):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(TypedDict):
    """A model's tensors; one that generates no text has none."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ConfigInput(TypedDict):
    name: str
    data_type: str
    dims: list[int]
    optional: Literal[True]


class ConfigOutput(TypedDict):
    name: str
    data_type: str
    dims: list[int]


class TransactionPolicy(TypedDict):
    decoupled: bool


class ConfigParameter(TypedDict):
    string_value: str


class ModelConfig(TypedDict):
    """A model's configuration in Triton's terms; ``max_batch_size`` 0 means that shapes include the batch."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    input: list[ConfigInput]
    output: list[ConfigOutput]
    model_transaction_policy: TransactionPolicy
    parameters: dict[str, ConfigParameter]


class IndexEntry(TypedDict):
    """A served model and version."""

    name: str
    version: str
    state: Literal["READY", "UNAVAILABLE"]
    reason: str


INFER = Exchange(
    example={
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["Once upon a time"]},
            {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [16]},
        ]
    },
    whole=InferReply,
    media=(JSON, BINARY),
)
