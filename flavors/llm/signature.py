"""The signature and the examples of a model. Lossless: it lists every request field as it is, of any type.

Registries and pages show it, Unity Catalog asks for it. Input is not held to it (``enforcement``), but where some other
program does so nothing known is lost: MLflow drops a key that the signature does not list, and converts one that it
lists with a type. So every field of every task is a column of any type, none required. One further column of type array
is never sent: MLflow wraps a single request into one row only where some column is an array
(``mlflow.models.utils._enforce_schema``).

``params`` have one type each in a signature: listed are the fields whose value is one number, word or flag.
"""

from __future__ import annotations

from typing import Any

from mlflow.models import ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import AnyType, Array

from ...serving.dialects import FIELDS, REFUSED_FIELDS
from ...serving.dialects.tables import MLFLOW
from ...serving.request import Task

ON_ERROR = "on_error"  # of predict itself, no field of a request
ROW_MARKER = "_one_request_per_row"

REPLY_FIELDS = {
    "id": DataType.string,
    "object": DataType.string,
    "created": DataType.long,
    "model": DataType.string,
    "choices": AnyType(),
    "data": AnyType(),
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
}


def request_fields() -> tuple[str, ...]:
    """Every field that a request of any task may carry, with those that are refused by name: a signature without
    them would have MLflow drop them unseen."""
    return tuple(dict.fromkeys([*(name for names in FIELDS.values() for name in names), *REFUSED_FIELDS]))


def params_schema() -> ParamSchema:
    """The fields that ``params=`` may give for all rows: of one scalar type in every task, and with an effect."""
    kinds: dict[str, set[str]] = {}
    for table in MLFLOW.values():
        for name, field in table.fields.items():
            if field.target is not None and name not in (table.required, "stream"):
                kinds.setdefault(name, set()).add(str(field.read.schema.get("type")))
    one = {name: PARAM_TYPES.get(kind.pop()) for name, kind in kinds.items() if len(kind) == 1}
    fields = [ParamSpec(name, kind, default=None) for name, kind in one.items() if kind is not None]
    return ParamSchema([*fields, ParamSpec(ON_ERROR, DataType.string, default=None)])


def is_lossless(schema: Schema | None) -> bool:
    """Whether ``schema`` is the input of a lossless signature, of this release or another."""
    return schema is not None and bool(schema.has_input_names()) and ROW_MARKER in schema.input_names()


def lossless_signature() -> ModelSignature:
    columns = [ColSpec(AnyType(), name, required=False) for name in request_fields()]
    columns.append(ColSpec(Array(AnyType()), ROW_MARKER, required=False))
    replies = [ColSpec(kind, name, required=False) for name, kind in REPLY_FIELDS.items()]
    return ModelSignature(inputs=Schema(columns), outputs=Schema(replies), params=params_schema())


def default_example(tasks: tuple[Task, ...]) -> dict[str, Any]:
    """A small request of the model's first task."""
    return EXAMPLES[tasks[0]]
