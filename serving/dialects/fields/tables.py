"""The request fields that the dialects share, each defined once.

``FIELDS[task]`` has the names of all fields that any of the OpenAI, Databricks and MLflow dialects accepts for a task:
the MLflow signature lists exactly these. The ``schema`` of each table goes into the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...interface.errors import InvalidField
from ...interface.readers import (
    INT32_MAX,
    INT64,
    UINT64_MAX,
    Entry,
    Reader,
    boolean,
    integer,
    list_of,
    number,
    one_of,
    reader,
    record,
    short_text,
    string,
)
from ...interface.request import MAX_CHOICES, Task, UsageChunks
from .beam_fields import BEAMS
from .chat_end import ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE
from .constraint_fields import BACKEND, GUIDED, WHITESPACE, response_format, structured_outputs
from .fields import Field, Table
from .label_fields import DATABRICKS_LABELS, METADATA, SAFETY_IDENTIFIER, USER_FIELD
from .messages import read_messages
from .prediction_fields import PREDICTION
from .scoring_fields import ScoreTable, query, texts
from .text_readers import TOKEN, bad_words, logit_bias, stop_strings, template_variables, texts_or_tokens
from .tool_fields import DATABRICKS as DATABRICKS_TOOLS
from .tool_fields import tool_choice, tools_reader

MAX_TOKENS = INT32_MAX
MAX_CACHE_SALT = 256  # characters
_CHUNKS_AS_THEY_ARE = one_of(False, why="chunks are sent as they are")


_STREAM_OPTIONS = record(
    include_usage=Entry(boolean, "an additional chunk with usage at the end"),
    continuous_usage_stats=Entry(boolean, "as in vLLM: usage so far in every chunk; needs include_usage"),
    include_obfuscation=Entry(_CHUNKS_AS_THEY_ARE),
)


@reader(**_STREAM_OPTIONS.schema)
def _stream_options(value: Any, path: str) -> UsageChunks:
    """Read ``stream_options``. The schema cannot express that continuous_usage_stats needs include_usage."""
    found = _STREAM_OPTIONS(value, path)
    if not found.get("include_usage"):
        if found.get("continuous_usage_stats"):
            raise InvalidField(f"{path}.continuous_usage_stats", True, "false unless include_usage is true")
        return "none"
    return "all" if found.get("continuous_usage_stats") else "last"


def _field(
    name: str,
    read: Reader[Any],
    target: str | None,
    description: str = "",
    note: str = "",
    *,
    default: bool | float | str | None = None,
    or_own: str = "",
) -> Field:
    """Create a field. ``or_own`` is its default if neither the model (``generation_config.json``) nor the endpoint has
    one."""
    return Field(
        name=name,
        read=read,
        target=target,
        description=description,
        note=note,
        default=default,
        default_words=f"{or_own}, or the model's own" if or_own else "",
    )


def _by_name(*groups: Iterable[Field]) -> dict[str, Field]:
    return {field.name: field for group in groups for field in group}


COMMON = (
    _field("model", string, "model", "endpoint, served entity, or endpoint:adapter"),
    USER_FIELD,
    _field(
        "cache_salt",
        short_text(MAX_CACHE_SALT),
        "cache_salt",
        "cached prompt prefixes are shared only with requests of the same salt and the same tenant",
    ),
)

ADAPTER = (_field("adapter", string, "adapter", "a LoRA adapter of the model"),)

STREAM = (
    _field("stream", boolean, "stream", "send server-sent events", default=False),
    _field(
        "stream_options",
        _stream_options,
        "usage_chunks",
        "include_usage: send an additional chunk with usage; continuous_usage_stats: usage in every chunk",
    ),
)

SAMPLING = (
    _field(
        "max_tokens",
        integer(1, MAX_TOKENS),
        "sampling.max_tokens",
        "maximum number of tokens to generate",
        or_own="the rest of the context",
    ),
    _field("temperature", number(0, 2), "sampling.temperature", "sampling temperature; 0 is greedy", or_own="1"),
    _field(
        "top_p",
        number(0, 1, above=True),
        "sampling.top_p",
        "nucleus sampling: the smallest set of tokens with this probability",
        or_own="1",
    ),
    _field("n", integer(1, MAX_CHOICES), "sampling.n", "number of choices", default=1),
    _field("stop", stop_strings, "sampling.stop", "strings that end the text and are not part of it"),
    _field("seed", integer(-INT64, UINT64_MAX), "sampling.seed", "the same seed gives the same text"),
    _field(
        "presence_penalty",
        number(-2, 2),
        "sampling.presence_penalty",
        "subtracted from the logits of tokens that have been generated",
        default=0,
    ),
    _field(
        "frequency_penalty",
        number(-2, 2),
        "sampling.frequency_penalty",
        "subtracted once for each time that a token has been generated",
        default=0,
    ),
    _field("logit_bias", logit_bias, "sampling.logit_bias", "biases in [-100, 100] by token id"),
)

TOP_K = (_field("top_k", integer(1, MAX_TOKENS), "sampling.top_k", "the k most probable tokens", or_own="all"),)
_TOP_K_OR_OFF = integer(-1, MAX_TOKENS)


@reader(**_TOP_K_OR_OFF.schema)
def _top_k_or_off(value: Any, path: str) -> int:
    """Read ``top_k``. In vLLM -1 and 0 mean no limit, even if the model's own default is a limit."""
    return max(0, _TOP_K_OR_OFF(value, path))


EXTENSIONS = (
    _field("top_k", _top_k_or_off, "sampling.top_k", "the k most probable tokens; -1 or 0: all", or_own="all"),
    _field(
        "min_p", number(0, 1), "sampling.min_p", "minimum probability relative to the most probable token", or_own="0"
    ),
    _field("typical_p", number(0, 1, above=True), "sampling.typical_p", "locally typical sampling", or_own="1"),
    _field(
        "repetition_penalty",
        number(0, 2, above=True),
        "sampling.repetition_penalty",
        "penalty on tokens of prompt and text; 1 is none",
        or_own="1",
    ),
    _field(
        "min_tokens",
        integer(0, MAX_TOKENS),
        "sampling.min_tokens",
        "minimum number of tokens before the text may end",
        or_own="0",
    ),
    _field(
        "stop_token_ids", list_of(TOKEN, "a list of token ids"), "sampling.stop_token_ids", "tokens that end the text"
    ),
    _field("bad_words", bad_words, "sampling.bad_words", "texts, or lists of token ids, that are never generated"),
    _field(
        "no_repeat_ngram_size",
        integer(0, MAX_TOKENS),
        "sampling.no_repeat_ngram_size",
        "n-grams of this size occur only once, including those of the prompt; 0: off",
        or_own="0",
    ),
    _field("ignore_eos", boolean, "sampling.ignore_eos", "continue after the end-of-text token", default=False),
    _field(
        "include_stop_str_in_output",
        boolean,
        "sampling.include_stop_str_in_output",
        "the text includes the stop string that ended it",
        default=False,
    ),
    _field(
        "skip_special_tokens",
        boolean,
        "sampling.skip_special_tokens",
        "false: special tokens appear in the text by name",
        default=True,
    ),
    _field("timeout", number(0, 86400, above=True), "sampling.timeout", "seconds that this request may take"),
)

ERROR_BEHAVIOR = (
    _field(
        "error_behavior",
        one_of("error", "truncate"),
        "sampling.error_behavior",
        "truncate: cut a prompt that is too long, or a generation that takes too long, instead of failing "
        "(pay-per-token endpoints); default error",
    ),
)

_FORMS = {
    "guided_json": "a JSON schema that the text must follow",
    "guided_regex": "a regular expression that the whole text must match",
    "guided_choice": "strings of which the text must be one",
    "guided_grammar": "a grammar in Lark's notation or GBNF that the text must follow",
}
# Constraints on the form of the text; a request has at most one of them (``decode``).
CONSTRAINTS = (
    _field(
        "response_format",
        response_format,
        "constraint.response_format",
        'text, json_object, or json_schema with a schema that the text is held to, whatever "strict" says',
    ),
    _field(
        "structured_outputs",
        structured_outputs,
        "constraint.structured_outputs",
        "as in vLLM: one of json, regex, choice, grammar and json_object",
    ),
    *(_field(name, GUIDED[name], f"constraint.{name}", words) for name, words in _FORMS.items()),
    _field("guided_decoding_backend", BACKEND, None, note="there is one"),
)
_PARALLEL = "allow several calls in one reply; false: at most one, and exactly one if calls are required"
TOOL_CHOICE = (
    _field(
        "tool_choice",
        tool_choice,
        "tool_choice",
        "none, auto (the default with tools), required, the tool to call, or the tools that may be called",
    ),
    _field("parallel_tool_calls", boolean, "parallel_tool_calls", _PARALLEL, default=True),
)
TOOLS = (_field("tools", tools_reader(), "tools", "functions that the model may call"), *TOOL_CHOICE)
DATABRICKS_TOOL_FIELDS = (
    _field(
        "tools",
        tools_reader(DATABRICKS_TOOLS),
        "tools",
        f"functions that the model may call: at most {DATABRICKS_TOOLS.maximum}, each described and of at most "
        f"{DATABRICKS_TOOLS.properties} properties",
    ),
    *TOOL_CHOICE,
)
CHAT = (
    _field("messages", read_messages, "messages", "a non-empty list of messages"),
    _field("logprobs", boolean, "sampling.logprobs", "log probabilities of the sampled tokens", default=False),
    _field("top_logprobs", integer(0, 20), "sampling.top_logprobs", "alternatives per token; needs logprobs"),
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
CHAT_TEMPLATE = (
    _field("chat_template", string, "chat_template", "name of one of the model's templates"),
    _field("chat_template_kwargs", template_variables, "chat_template_kwargs", "variables for the chat template"),
    _field(
        "reasoning_effort",
        one_of(*EFFORTS),
        "reasoning_effort",
        "none: the model does not reason; the others are for templates that read reasoning_effort",
    ),
    _field("add_generation_prompt", boolean, "add_generation_prompt", ADD_GENERATION_PROMPT),
    _field("continue_final_message", boolean, "continue_final_message", CONTINUE_FINAL_MESSAGE, default=False),
)
MAX_COMPLETION_TOKENS = (
    _field("max_completion_tokens", integer(1, MAX_TOKENS), "max_completion_tokens", "the newer name of max_tokens"),
)

COMPLETIONS = (
    _field(
        "max_tokens",
        integer(0, MAX_TOKENS),
        "sampling.max_tokens",
        "maximum number of tokens to generate; 0 with echo returns the logprobs of the prompt",
        or_own="the rest of the context",
    ),
    _field("prompt", texts_or_tokens, "prompts", "a string, token ids, or a list of either"),
    _field("suffix", string, "suffix", "appended to the end of each completion"),
    _field("echo", boolean, "echo", "return the prompt together with the completion", default=False),
    _field("logprobs", integer(0, 20), "sampling.top_logprobs", "alternatives per token"),
)
NO_TOOLS = "tools are called in chats"
_COMPLETIONS_WITHOUT_MEANING = (_field("parallel_tool_calls", boolean, None, note=NO_TOOLS),)
USE_RAW_PROMPT = (_field("use_raw_prompt", boolean, "use_raw_prompt", "false: the chat template is applied"),)

EMBEDDINGS = (
    _field("input", texts_or_tokens, "inputs", "a string, token ids, or a list of either"),
    _field("dimensions", integer(1, MAX_TOKENS), "dimensions", "truncate vectors to this many values and renormalise"),
    _field("encoding_format", one_of("float", "base64"), "encoding_format", "encoding of vectors", default="float"),
)
TRUNCATION = (
    _field(
        "truncate_prompt_tokens",
        integer(-1, MAX_TOKENS),
        "truncate",
        "truncate each text or pair to this many tokens, -1: to the model's limit; by default longer ones are refused",
    ),
    _field("use_activation", boolean, "activate", "false: the output of a cross-encoder without its activation"),
)
QUERY = (
    _field("query", query, "queries", "the text to compare documents with"),
    _field("documents", texts, "documents", "a text or a list of them, each a string or an object with text"),
)
RANKING = (
    _field("top_n", integer(0, MAX_TOKENS), "top_n", "number of best documents to return; 0: all"),
    _field("return_documents", boolean, "return_documents", "return the documents' texts with their scores"),
    _field(
        "max_tokens_per_doc", integer(1, MAX_TOKENS), "truncate_documents", "truncate each document to this many tokens"
    ),
)
PAIRS = (
    _field("text_1", texts, "queries", "a text, or as many as in text_2"),
    _field("text_2", texts, "documents", "a text or a list of them"),
)
OTHER_PAIRS = tuple(
    field.replace(name=name)
    for field, names in zip(PAIRS, (("queries", "data_1"), ("documents", "items", "data_2")), strict=True)
    for name in names
)
INSTRUCTION = (_field("instruction", string, "instruction", "prepended to each input, as the model card says"),)

LABELS = (METADATA, SAFETY_IDENTIFIER)

# Fields that are meant for other services around the model; each field's note says why it has no effect here.
WITHOUT_MEANING = (
    _field("store", one_of(False, why="completions are not stored"), None, note="nothing is stored"),
    _field(
        "service_tier",
        one_of("auto", "default", why="there is one tier"),
        None,
        note="there is one tier, with both names",
    ),
    _field("prompt_cache_key", string, None, note="a routing hint, which the prefix cache does not need"),
    _field(
        "prompt_cache_retention",
        one_of("in_memory", "24h"),
        None,
        note="prefixes stay in memory while there is room",
    ),
    _field("modalities", one_of(["text"], why="the model writes text"), None, note="only text is generated"),
)


def _nothing(why: str) -> Reader[Any]:
    return one_of([], {}, why=why)


_NEWER = "the newer tools and tool_choice say the same"
NOT_BUILT: Mapping[str, Reader[Any]] = {
    "functions": _nothing(_NEWER),
    "function_call": one_of("none", "auto", [], {}, why=_NEWER),
    "audio": _nothing("the model writes text only"),
    "verbosity": one_of("medium", [], {}, why="the model has no such setting"),
    "web_search_options": _nothing("web search is not supported"),
    "guided_whitespace_pattern": _nothing(WHITESPACE),
    "watermark": one_of(False, why="watermarks are not supported"),
}
_COMPLETIONS_NOT_BUILT = {
    **NOT_BUILT,
    "reasoning_effort": _nothing("a prompt has no such setting"),
    "tools": _nothing(NO_TOOLS),
    "prediction": _nothing("replies are predicted in chats"),
}

_GENERATE = (COMMON, STREAM, SAMPLING, EXTENSIONS, BEAMS, CONSTRAINTS, LABELS, WITHOUT_MEANING)
_COMPLETE = (*_GENERATE, COMPLETIONS, _COMPLETIONS_WITHOUT_MEANING)

OPENAI: Mapping[Task, Table] = {
    "chat": Table(
        required="messages",
        fields=_by_name(*_GENERATE, CHAT, TOOLS, CHAT_TEMPLATE, MAX_COMPLETION_TOKENS, PREDICTION),
        refused=NOT_BUILT,
    ),
    "completions": Table(required="prompt", fields=_by_name(*_COMPLETE), refused=_COMPLETIONS_NOT_BUILT),
    "embeddings": Table(required="input", fields=_by_name(COMMON, EMBEDDINGS)),
    "score": ScoreTable(
        required="text_1",
        fields=_by_name(COMMON, PAIRS, OTHER_PAIRS, TRUNCATION),
        forms=(("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")),
    ),
}
RERANK = ScoreTable(
    required="query", fields=_by_name(COMMON, QUERY, RANKING, TRUNCATION), forms=(("query", "documents"),)
)

TIMEOUT = _field("timeout", number(0, 86400, above=True), "timeout", "seconds that this request may take")
_EMBEDDING_EXTRAS = (
    _field(
        "error_behavior", one_of("error", "truncate"), "error_behavior", "truncate: truncate inputs that are too long"
    ),
    TIMEOUT,
)
_DATABRICKS_ANY = (ADAPTER, DATABRICKS_LABELS)

# ``TOP_K`` is the document's ("null or an integer above zero"): it comes after the extensions' and so replaces it.
DATABRICKS: Mapping[Task, Table] = {
    "chat": Table(
        required="messages",
        fields=_by_name(
            *_GENERATE,
            TOP_K,
            CHAT,
            DATABRICKS_TOOL_FIELDS,
            CHAT_TEMPLATE,
            MAX_COMPLETION_TOKENS,
            PREDICTION,
            ERROR_BEHAVIOR,
            *_DATABRICKS_ANY,
        ),
        refused=NOT_BUILT,
    ),
    "completions": Table(
        required="prompt",
        fields=_by_name(*_COMPLETE, TOP_K, USE_RAW_PROMPT, ERROR_BEHAVIOR, *_DATABRICKS_ANY),
        refused=_COMPLETIONS_NOT_BUILT,
    ),
    "embeddings": Table(
        required="input", fields=_by_name(COMMON, EMBEDDINGS, INSTRUCTION, _EMBEDDING_EXTRAS, *_DATABRICKS_ANY)
    ),
    "score": ScoreTable(
        required="query",
        fields=_by_name(COMMON, QUERY, PAIRS, RANKING, TRUNCATION, (TIMEOUT,), *_DATABRICKS_ANY),
        forms=(("query", "documents"), ("text_1", "text_2")),
    ),
}

# The pyfunc form accepts the fields of both; scores are read in the form of Databricks, as OpenAI has none.
MLFLOW: Mapping[Task, Table] = {
    task: Table(
        required=OPENAI[task].required,
        fields={**DATABRICKS[task].fields, **OPENAI[task].fields},
        refused=OPENAI[task].refused,
    )
    for task in OPENAI
    if task != "score"
} | {"score": DATABRICKS["score"]}

FIELDS: Mapping[Task, tuple[str, ...]] = {
    "chat": tuple(MLFLOW["chat"].fields),
    "completions": tuple(MLFLOW["completions"].fields),
    "embeddings": tuple(MLFLOW["embeddings"].fields),
    "score": tuple(MLFLOW["score"].fields),
}
# In the MLflow signature too, so that these fields reach the reader that refuses them and are not silently dropped.
REFUSED_FIELDS: tuple[str, ...] = tuple(NOT_BUILT)
