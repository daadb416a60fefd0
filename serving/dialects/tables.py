"""The request fields that our dialects share, each written once.

``FIELDS[task]`` are the names of every field any of the OpenAI, Databricks and MLflow dialects accepts for a task: the
MLflow signature lists exactly these, and ``schema`` of each field goes into the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import InvalidField
from ..request import Task
from .fields import (
    INT64,
    UINT64_MAX,
    Field,
    Reader,
    Table,
    boolean,
    integer,
    list_of,
    logit_bias,
    number,
    obj,
    one_of,
    stop_strings,
    string,
    texts_or_tokens,
)
from .messages import read_messages

MAX_TOKENS = 2**31 - 1


def _null_or(allowed: tuple[Any, ...], why: str) -> Reader:
    """Takes only the values that ask for nothing beyond what is done anyway."""

    def read(value: Any, path: str) -> Any:
        if not any(type(value) is type(option) and value == option for option in allowed):
            options = ", ".join(["null", *map(repr, allowed)])
            raise InvalidField(path, value, f"one of {options}: {why}")
        return value

    return read


def _stream_options(value: Any, path: str) -> bool:
    for key, entry in obj(value, path).items():
        if key not in ("include_usage", "include_obfuscation"):
            raise InvalidField(f"{path}.{key}", entry, "only include_usage")
        if entry is not None:
            boolean(entry, f"{path}.{key}")
    if value.get("include_obfuscation"):
        raise InvalidField(f"{path}.include_obfuscation", True, "false: chunks are sent as they are")
    return bool(value.get("include_usage"))


def _response_format(value: Any, path: str) -> None:
    if obj(value, path) != {"type": "text"}:
        raise InvalidField(path, value, '{"type": "text"}: structured output is not supported yet')


def _field(
    name: str, read: Reader, target: str | None, kind: str | list[str], description: str, note: str = "", **schema: Any
) -> Field:
    return Field(
        name=name,
        read=read,
        target=target,
        note=note,
        schema={"type": kind, "description": description, **schema},
    )


def _by_name(*groups: Iterable[Field]) -> dict[str, Field]:
    return {field.name: field for group in groups for field in group}


COMMON = (
    _field("model", string, "model", "string", "endpoint, served entity, or endpoint:adapter"),
    _field("user", string, "user", "string", "an id of the end user, kept in the request's line of the log"),
)

ADAPTER = (_field("adapter", string, "adapter", "string", "a LoRA adapter of the model"),)

STREAM = (
    _field("stream", boolean, "stream", "boolean", "send server-sent events", default=False),
    _field("stream_options", _stream_options, "include_usage", "object", "include_usage: one more chunk with usage"),
)

SAMPLING = (
    _field(
        "max_tokens", integer(1, MAX_TOKENS), "sampling.max_tokens", "integer", "tokens to generate at most", minimum=1
    ),
    _field(
        "temperature", number(0, 2), "sampling.temperature", "number", "0 is deterministic", minimum=0, maximum=2
    ),
    _field(
        "top_p", number(0, 1, above=True), "sampling.top_p", "number", "nucleus", exclusiveMinimum=0, maximum=1
    ),
    _field("n", integer(1, MAX_TOKENS), "sampling.n", "integer", "independent choices", minimum=1),
    _field("stop", stop_strings, "sampling.stop", ["string", "array"], "strings that end the text; not part of it"),
    _field("seed", integer(-INT64, UINT64_MAX), "sampling.seed", "integer", "same seed, same text"),
    _field(
        "presence_penalty", number(-2, 2), "sampling.presence_penalty", "number", "", minimum=-2, maximum=2
    ),
    _field(
        "frequency_penalty", number(-2, 2), "sampling.frequency_penalty", "number", "", minimum=-2, maximum=2
    ),
    _field("logit_bias", logit_bias, "sampling.logit_bias", "object", "token id to a bias in [-100, 100]"),
)  # fmt: skip

TOP_K = (_field("top_k", integer(1, MAX_TOKENS), "sampling.top_k", "integer", "the k most probable tokens", minimum=1),)


def _top_k_or_off(value: Any, path: str) -> int | None:
    """-1 and 0 mean no limit to vLLM's clients."""
    found: int = integer(-1, MAX_TOKENS)(value, path)
    return found if found > 0 else None


EXTENSIONS = (
    _field("top_k", _top_k_or_off, "sampling.top_k", "integer", "the k most probable tokens; -1 or 0: all"),
    _field("min_p", number(0, 1), "sampling.min_p", "number", "least probability relative to the best token"),
    _field("typical_p", number(0, 1, above=True), "sampling.typical_p", "number", "locally typical sampling"),
    _field(
        "repetition_penalty", number(0, 2, above=True), "sampling.repetition_penalty", "number", "1 is none"
    ),
    _field("min_tokens", integer(0, MAX_TOKENS), "sampling.min_tokens", "integer", "tokens before an end is allowed"),
    _field(
        "stop_token_ids",
        list_of(integer(0, 2**31 - 1), "a list of token ids"),
        "sampling.stop_token_ids",
        "array",
        "tokens that end the text",
    ),
    _field("ignore_eos", boolean, "sampling.ignore_eos", "boolean", "go on behind the end-of-text token"),
    _field("include_stop_str_in_output", boolean, "sampling.include_stop_str_in_output", "boolean", ""),
    _field("skip_special_tokens", boolean, "sampling.skip_special_tokens", "boolean", "", default=True),
    _field(
        "timeout", number(0, 86400, above=True), "sampling.timeout", "number", "seconds this request may take"
    ),
)  # fmt: skip

ERROR_BEHAVIOR = (
    _field(
        "error_behavior",
        one_of("error", "truncate"),
        "sampling.error_behavior",
        "string",
        "truncate: cut an over-long prompt or an over-long run instead of failing (pay-per-token endpoints)",
    ),
)

CHAT = (
    _field("messages", read_messages, "messages", "array", "a non-empty list of messages"),
    _field("logprobs", boolean, "sampling.logprobs", "boolean", "log probabilities of the sampled tokens"),
    _field("top_logprobs", integer(0, 20), "sampling.top_logprobs", "integer", "alternatives a token; needs logprobs"),
    _field("response_format", _response_format, None, "object", 'only {"type": "text"}', "text is what is produced"),
    _field(
        "tool_choice",
        _null_or(("none", "auto"), "tool calls are not supported yet"),
        None,
        ["string", "object"],
        "",
        "without tools neither value asks for anything",
    ),
)
CHAT_TEMPLATE = (
    _field("chat_template", string, "chat_template", "string", "name of one of the model's templates"),
    _field("chat_template_kwargs", obj, "chat_template_kwargs", "object", "variables of the template"),
)
MAX_COMPLETION_TOKENS = (
    _field(
        "max_completion_tokens", integer(1, MAX_TOKENS), "max_completion_tokens", "integer", "newer name of max_tokens"
    ),
)

COMPLETIONS = (
    _field("prompt", texts_or_tokens, "prompts", ["string", "array"], "a string, token ids, or a list of either"),
    _field("suffix", string, "suffix", "string", "appended to the end of each completion"),
    _field("echo", boolean, "echo", "boolean", "return the prompt together with the completion"),
    _field("logprobs", integer(0, 20), "sampling.top_logprobs", "integer", "alternatives for each token"),
    _field("best_of", integer(1, MAX_TOKENS), "best_of", "integer", "must equal n: no ranking of hidden choices"),
)
USE_RAW_PROMPT = (
    _field("use_raw_prompt", boolean, "use_raw_prompt", "boolean", "false: the chat template is applied"),
)

EMBEDDINGS = (
    _field("input", texts_or_tokens, "inputs", ["string", "array"], "a string, token ids, or a list of either"),
    _field("dimensions", integer(1, MAX_TOKENS), "dimensions", "integer", "keep the first values and renormalise"),
    _field(
        "encoding_format", one_of("float", "base64"), "encoding_format", "string", "", enum=["float", "base64"]
    ),
)  # fmt: skip
INSTRUCTION = (
    _field("instruction", string, "instruction", "string", "put before each input, as the model's card says"),
)

# Fields that ask for something of another service around the model; the reason is each field's note.
WITHOUT_MEANING = (
    _field("metadata", obj, None, "object", "", "labels for OpenAI's stored completions; nothing is stored here"),
    _field("store", _null_or((False,), "completions are not stored"), None, "boolean", "", "nothing is stored"),
    _field(
        "service_tier",
        _null_or(("auto", "default"), "there is one tier"),
        None,
        "string",
        "",
        "one tier: both names mean it",
    ),
    _field("prompt_cache_key", string, None, "string", "", "a routing hint; the prefix cache needs none"),
    _field("safety_identifier", string, None, "string", "", "OpenAI's abuse reports only"),
    _field(
        "modalities", _null_or((["text"],), "the model writes text"), None, "array", "", "text is what is produced"
    ),
    _field("parallel_tool_calls", boolean, None, "boolean", "", "says how tools are called; there are none"),
)  # fmt: skip
DATABRICKS_WITHOUT_MEANING = (
    # mlflow.genai.to_predict_fn adds {"return_trace": true} and copes with an answer that has no trace
    _field("databricks_options", obj, None, "object", "", "MLflow's evaluation asks for a trace if there is one"),
    _field("usage_context", obj, None, "object", "", "labels for the platform's usage table"),
    _field("client_request_id", string, None, "string", "", "a label for the platform's inference table"),
)

NOT_BUILT = {
    "tools": "tool calls are not supported yet",
    "functions": "tool calls are not supported yet",
    "function_call": "tool calls are not supported yet",
    "audio": "the model writes text only",
    "prediction": "predicted outputs are not supported",
    "reasoning_effort": "the model has no such setting",
    "verbosity": "the model has no such setting",
    "web_search_options": "web search is not supported",
    "guided_json": "structured output is not supported yet",
    "guided_regex": "structured output is not supported yet",
    "guided_choice": "structured output is not supported yet",
    "guided_grammar": "structured output is not supported yet",
    "use_beam_search": "beam search is not supported yet",
    "watermark": "watermarks are not supported",
}

_GENERATE = (COMMON, STREAM, SAMPLING, EXTENSIONS, WITHOUT_MEANING)

OPENAI: Mapping[str, Table] = {
    "chat": Table(
        required="messages",
        fields=_by_name(*_GENERATE, CHAT, CHAT_TEMPLATE, MAX_COMPLETION_TOKENS),
        refused=NOT_BUILT,
    ),
    "completions": Table(required="prompt", fields=_by_name(*_GENERATE, COMPLETIONS), refused=NOT_BUILT),
    "embeddings": Table(required="input", fields=_by_name(COMMON, EMBEDDINGS)),
}

_EMBEDDING_EXTRAS = (
    _field("error_behavior", one_of("error", "truncate"), "error_behavior", "string", "truncate: cut a long input"),
    _field("timeout", number(0, 86400, above=True), "timeout", "number", "seconds this request may take"),
)
_DATABRICKS_ANY = (ADAPTER, DATABRICKS_WITHOUT_MEANING)

# The document's own ``top_k`` ("null or an integer above zero") stands after the extensions' and so wins over it.
DATABRICKS: Mapping[str, Table] = {
    "chat": Table(
        required="messages",
        fields=_by_name(
            *_GENERATE, TOP_K, CHAT, CHAT_TEMPLATE, MAX_COMPLETION_TOKENS, ERROR_BEHAVIOR, *_DATABRICKS_ANY
        ),
        refused=NOT_BUILT,
    ),
    "completions": Table(
        required="prompt",
        fields=_by_name(*_GENERATE, TOP_K, COMPLETIONS, USE_RAW_PROMPT, ERROR_BEHAVIOR, *_DATABRICKS_ANY),
        refused=NOT_BUILT,
    ),
    "embeddings": Table(
        required="input", fields=_by_name(COMMON, EMBEDDINGS, INSTRUCTION, _EMBEDDING_EXTRAS, *_DATABRICKS_ANY)
    ),
}

# The pyfunc form takes what either accepts.
MLFLOW: Mapping[str, Table] = {
    task: Table(
        required=OPENAI[task].required,
        fields={**DATABRICKS[task].fields, **OPENAI[task].fields},
        refused=OPENAI[task].refused,
    )
    for task in OPENAI
}

FIELDS: Mapping[Task, tuple[str, ...]] = {
    "chat": tuple(MLFLOW["chat"].fields),
    "completions": tuple(MLFLOW["completions"].fields),
    "embeddings": tuple(MLFLOW["embeddings"].fields),
}
# Named so that a signature carries them to where they are refused, rather than dropping them unseen.
REFUSED_FIELDS: tuple[str, ...] = tuple(NOT_BUILT)
