"""A model's signature and examples. The signature is lossless: every request field is a column of any type.

Registries and web pages show the signature, and Unity Catalog requires it. ``signature_enforcement`` bypasses it here.
If another program enforces it, no field is lost, although MLflow drops keys that a signature does not list and casts
those to which it gives a type. One further column, of type array, is never sent: MLflow wraps a single request into one
row only if some column is an array (``mlflow.models.utils._enforce_schema``).

Each of a signature's ``params`` has one scalar type, so they list the fields whose value is a number, string or
boolean.
"""

from __future__ import annotations

from typing import Any

from mlflow.models import ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import AnyType, Array

from ....serving.dialects.fields.fields import CONTENT
from ....serving.dialects.fields.tables import MLFLOW
from ....serving.interface.request import Task
from .request_fields import request_fields

ON_ERROR = "on_error"  # a parameter of predict itself, not a request field
OUTPUT = "output"  # likewise
ROW_MARKER = "_one_request_per_row"

REPLY_FIELDS = {
    "id": DataType.string,
    "object": DataType.string,
    "created": DataType.long,
    "model": DataType.string,
    "choices": AnyType(),
    "data": AnyType(),
    "results": AnyType(),
    "usage": AnyType(),
}

PARAM_TYPES = {
    "integer": DataType.long,
    "number": DataType.double,
    "boolean": DataType.boolean,
    "string": DataType.string,
}

EXAMPLES: dict[Task, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16},
    "completions": {"prompt": "Once upon a time", "max_tokens": 16},
    "embeddings": {"input": ["The quick brown fox"]},
    "score": {"query": "What is a fox?", "documents": ["An animal.", "A colour."]},
}


def params_schema() -> ParamSchema:
    """Return the fields that ``params=`` may set for all rows: those with an effect and one scalar type in every
    task."""
    kinds: dict[str, set[str]] = {}
    for table in MLFLOW.values():
        for name, field in table.fields.items():
            if field.target is not None and name not in (table.required, "stream", *CONTENT):
                kinds.setdefault(name, set()).add(str(field.read.schema.get("type")))
    one = {name: PARAM_TYPES.get(kind.pop()) for name, kind in kinds.items() if len(kind) == 1}
    fields = [ParamSpec(name, kind, default=None) for name, kind in one.items() if kind is not None]
    own = [ParamSpec(name, DataType.string, default=None) for name in (ON_ERROR, OUTPUT)]
    return ParamSchema([*fields, *own])


def is_lossless(schema: Schema | None) -> bool:
    """Return whether ``schema`` is the input schema of a lossless signature, from this release or another."""
    return schema is not None and bool(schema.has_input_names()) and ROW_MARKER in schema.input_names()


def lossless_signature() -> ModelSignature:
    """Return the signature of every model that is logged without a signature of the caller's own."""
    columns = [ColSpec(AnyType(), name, required=False) for name in request_fields()]
    columns.append(ColSpec(Array(AnyType()), ROW_MARKER, required=False))
    replies = [ColSpec(kind, name, required=False) for name, kind in REPLY_FIELDS.items()]
    return ModelSignature(inputs=Schema(columns), outputs=Schema(replies), params=params_schema())


def default_example(tasks: tuple[Task, ...]) -> dict[str, Any]:
    """Return a small request of the model's first task."""
    return EXAMPLES[tasks[0]]
