"""The signature and the examples of a model. Lossless: MLflow passes every request field on as it came.

MLflow drops a key that the signature does not list, and converts one that it lists with a type. So every field of
every task is a column of any type, none required. One further column of type array is never sent: MLflow wraps a
single request into one row only where some column is an array (``mlflow.models.utils._enforce_schema``).
"""

from __future__ import annotations

from typing import Any

from mlflow.models import ModelSignature
from mlflow.types import ColSpec, DataType, Schema
from mlflow.types.schema import AnyType, Array

from ...serving.request import Task

ROW_MARKER = "_one_request_per_row"

COMMON_FIELDS = (
    "model",
    "adapter",
    "stream",
    "stream_options",
    "user",
    "metadata",
    "timeout",
    "error_behavior",
    "databricks_options",
    "custom_inputs",
)
SAMPLING_FIELDS = (
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "n",
    "best_of",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "seed",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
CHAT_FIELDS = (
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "chat_template",
    "chat_template_kwargs",
)
COMPLETION_FIELDS = ("prompt", "suffix", "echo", "use_raw_prompt")
EMBEDDING_FIELDS = ("input", "instruction", "dimensions", "encoding_format")

REPLY_FIELDS = {
    "id": DataType.string,
    "object": DataType.string,
    "created": DataType.long,
    "model": DataType.string,
    "choices": AnyType(),
    "data": AnyType(),
    "usage": AnyType(),
}

EXAMPLES: dict[Task, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16},
    "completions": {"prompt": "Once upon a time", "max_tokens": 16},
    "embeddings": {"input": ["The quick brown fox"]},
}


def request_fields() -> tuple[str, ...]:
    """Every field that a request of any task may carry."""
    listed = CHAT_FIELDS + COMPLETION_FIELDS + EMBEDDING_FIELDS + SAMPLING_FIELDS + COMMON_FIELDS
    return tuple(dict.fromkeys(listed))


def lossless_signature() -> ModelSignature:
    columns = [ColSpec(AnyType(), name, required=False) for name in request_fields()]
    columns.append(ColSpec(Array(AnyType()), ROW_MARKER, required=False))
    replies = [ColSpec(kind, name, required=False) for name, kind in REPLY_FIELDS.items()]
    return ModelSignature(inputs=Schema(columns), outputs=Schema(replies))


def default_example(tasks: tuple[Task, ...]) -> dict[str, Any]:
    """A small request of the model's first task."""
    return EXAMPLES[tasks[0]]
