"""Weights that come with a request: an adapter (``LoraTask``) or vectors of virtual tokens (``PromptTable``).

This module checks their form and whether the endpoint takes them. The engine checks them against the model's shapes.
"""

from __future__ import annotations

from ..interface.errors import InvalidField
from ..interface.request import LoraTask, RawCompletion, RawRequest
from .prompt.endpoint import EndpointView

MAX_TASK_ID = 2**64 - 1
FLOAT_BYTES = 4  # bytes


def adapter_of(raw: RawRequest, endpoint: EndpointView) -> str | None:
    """Return the endpoint's adapter that answers the request; None for the base model.

    A request that brings its own adapter uses none of the endpoint's. Raises ``InvalidField`` if it also names one, and
    the same errors as ``EndpointView.find_adapter``.
    """
    if raw.lora_task is None:
        return endpoint.find_adapter(raw.model, raw.adapter)
    named = endpoint.named_adapter(raw.model, raw.adapter)
    if named is not None:
        raise InvalidField("lora_task_id", raw.lora_task.task_id, f"null where an adapter is named, {named!r}")
    return None


def check_lora_task(raw: RawRequest, endpoint: EndpointView) -> None:
    """Check the form of the adapter that comes with the request. Raises ``InvalidField``."""
    task = raw.lora_task
    if task is None:
        return
    if not endpoint.info.capabilities.lora_tasks:
        raise InvalidField("lora_task_id", task.task_id, "null: this model's engine takes no adapters with requests")
    if not 0 <= task.task_id <= MAX_TASK_ID:
        raise InvalidField("lora_task_id", task.task_id, f"an integer in [0, {MAX_TASK_ID}]")
    if (task.weights is None) != (task.config is None):
        lacking = "lora_weights" if task.weights is None else "lora_config"
        other = "lora_config" if task.weights is None else "lora_weights"
        raise InvalidField(lacking, None, f"a tensor beside {other}: the two come together")
    if task.weights is not None and task.config is not None:
        _check_rows(task, task.weights, task.config)


def _check_rows(task: LoraTask, weights: bytes, config: tuple[tuple[int, ...], ...]) -> None:
    if not config:
        raise InvalidField("lora_config", [], "at least one row of [module_id, layer_idx, adapter_size]")
    for i, row in enumerate(config):
        if len(row) not in (3, 4):
            raise InvalidField(f"lora_config[{i}]", list(row), "[module_id, layer_idx, adapter_size], or is_dora too")
    if not weights or len(weights) % (FLOAT_BYTES * len(config)):
        raise InvalidField("lora_weights", f"{len(weights)} bytes", f"as many rows as lora_config has, {len(config)}")


def check_prompt_table(raw: RawRequest, endpoint: EndpointView) -> None:
    """Check the request's prompt table and its size. Raises ``InvalidField``."""
    table = raw.prompt_table
    if table is None:
        return
    field = "prompt_embedding_table"
    given = f"{len(table.data)} bytes"
    if not endpoint.info.capabilities.prompt_tables:
        raise InvalidField(field, given, "null: this model's engine takes no prompt tables")
    if not isinstance(raw, RawCompletion) or any(isinstance(prompt, str) for prompt in raw.prompts):
        raise InvalidField(field, given, "null unless the prompt is token ids: no text has ids for its rows")
    maximum = endpoint.context
    if not 1 <= table.num_tokens <= maximum:
        raise InvalidField("prompt_vocab_size", table.num_tokens, f"an integer in [1, {maximum}]")
    width = endpoint.info.hidden_size
    if len(table.data) != table.num_tokens * width * FLOAT_BYTES:
        size = f"[{table.num_tokens}, {width}] numbers, as prompt_vocab_size and the model's hidden size say"
        raise InvalidField(field, f"{len(table.data) // FLOAT_BYTES} numbers", size)
