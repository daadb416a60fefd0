"""Metadata of server and models in KServe's protocol (v2), and the configuration that Triton's clients ask for."""

from __future__ import annotations

from collections.abc import Sequence

from mlflow_llm import __version__

from .replies import OUTPUTS, OutputField
from .reply_types import (
    ConfigInput,
    ConfigOutput,
    IndexEntry,
    ModelConfig,
    ModelMetadata,
    ServerMetadata,
    TensorMetadata,
)
from .tensor_fields import FIELDS, TensorField
from .tensors import BYTES

SERVER = "mlflow-llm"
PLATFORM = "mlflow-llm"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository")


def server_metadata() -> ServerMetadata:
    """Return the response to ``GET /v2``."""
    return {"name": SERVER, "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(name: str, versions: Sequence[str], *, generates: bool) -> ModelMetadata:
    """Return a model's tensors; a model that generates no text has none."""
    inputs = FIELDS.values() if generates else ()
    outputs = OUTPUTS.values() if generates else ()
    return {
        "name": name,
        "versions": list(versions),
        "platform": PLATFORM,
        "inputs": [_tensor(field.name, field.datatypes[0], field.shape) for field in inputs],
        "outputs": [_tensor(field.name, field.datatype, field.shape) for field in outputs],
    }


def model_config(name: str, *, generates: bool, max_model_len: int, vocab_size: int) -> ModelConfig:
    """Return Triton's model configuration. ``max_batch_size`` 0: shapes include the batch dimension, which is 1."""
    return {
        "name": name,
        "platform": PLATFORM,
        "backend": SERVER,
        "max_batch_size": 0,
        "input": [_input(field) for field in FIELDS.values() if generates],
        "output": [_output(field) for field in OUTPUTS.values() if generates],
        "model_transaction_policy": {"decoupled": generates},
        "parameters": {
            "max_model_len": {"string_value": str(max_model_len)},
            "vocab_size": {"string_value": str(vocab_size)},
        },
    }


def index_entry(name: str, version: str, *, is_ready: bool) -> IndexEntry:
    """Return a model's entry in the repository's index."""
    if is_ready:
        return {"name": name, "version": version, "state": "READY", "reason": ""}
    return {"name": name, "version": version, "state": "UNAVAILABLE", "reason": "no engine is ready"}


def data_type(datatype: str) -> str:
    """Return a datatype as model configurations spell it."""
    return "TYPE_STRING" if datatype == BYTES else f"TYPE_{datatype}"


def _tensor(name: str, datatype: str, shape: Sequence[int]) -> TensorMetadata:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def _input(field: TensorField) -> ConfigInput:
    return {
        "name": field.name,
        "data_type": data_type(field.datatypes[0]),
        "dims": list(field.shape),
        "optional": True,  # there are alternatives: input_ids or text_input, request_output_len or max_tokens
    }


def _output(field: OutputField) -> ConfigOutput:
    return {"name": field.name, "data_type": data_type(field.datatype), "dims": list(field.shape)}
