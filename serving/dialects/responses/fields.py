"""Bodies of the Responses API, read into ``request.RawChat``.

Source of the format: the API reference of ``/v1/responses``. Additional sampling fields are those of this server's chat
completions; clients send them as ``extra_body``. Fields that need stored responses are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ...interface.errors import InvalidField
from ...interface.labels import MAX_TAG_NAME, MAX_TAG_VALUE, MAX_TAGS, take_labels
from ...interface.readers import Entry, Reader, boolean, integer, list_of, one_of, reader, record, refused, string
from ...interface.request import Message, RawChat, RawSampling
from ..fields.constraint_fields import only
from ..fields.fields import Field, Table
from ..fields.label_fields import METADATA, SAFETY_IDENTIFIER
from ..fields.tables import EFFORTS, MAX_TOKENS, OPENAI
from ..fields.tool_fields import chosen
from .input import NO_TOOLS_OF_ITS_OWN, NOT_STORED, read_input
from .replies import NAMESPACES
from .tools import namespaces, read_text, read_tool_choice, read_tools, shown_text, shown_tools

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

# "auto" asks for the most detailed summary that the model has: here there is none, and reasoning is given as it is
_SUMMARY = one_of("auto", why="reasoning is given as it is, in content; nothing sums it up")
_REASONING = record(
    effort=Entry(
        one_of(*EFFORTS), "none: the model does not reason; the others are for templates that read reasoning_effort"
    ),
    summary=Entry(_SUMMARY),
    generate_summary=Entry(_SUMMARY),
    mode=Entry(one_of("standard", why="there is one mode")),
    context=Entry(one_of("auto", why="the chat template decides which reasoning is shown again")),
)


_TRUNCATION = one_of("auto", "disabled")


@reader(**_TRUNCATION.schema)
def _truncation(value: Any, path: str) -> str | None:
    return "truncate" if _TRUNCATION(value, path) == "auto" else None


MAX_CLIENT_LABELS = 64
MAX_CLIENT_LABEL = 2**16  # characters: Codex describes its session and working directories in one of them


@reader(
    type="object",
    maxProperties=MAX_CLIENT_LABELS,
    propertyNames={"maxLength": MAX_TAG_NAME},
    additionalProperties={"type": "string", "maxLength": MAX_CLIENT_LABEL},
)
def _client_metadata(value: Any, path: str) -> dict[str, str]:
    """Read what a client says about itself and its session. Return the texts that are short enough to be labels."""
    if not isinstance(value, dict) or len(value) > MAX_CLIENT_LABELS:
        raise InvalidField(path, value, f"an object of at most {MAX_CLIENT_LABELS} labels")
    for name, label in value.items():
        if not 1 <= len(string(name, path)) <= MAX_TAG_NAME:
            raise InvalidField(path, name, f"labels whose names have 1 to {MAX_TAG_NAME} characters")
        if len(string(label, f"{path}.{name}")) > MAX_CLIENT_LABEL:
            raise InvalidField(f"{path}.{name}", label, f"a text of at most {MAX_CLIENT_LABEL} characters")
    short = [(name, label) for name, label in value.items() if len(label) <= MAX_TAG_VALUE and "\0" not in name + label]
    return dict(short[:MAX_TAGS])


_WHY_NOTHING_ELSE = f"images are not sent back, and {NO_TOOLS_OF_ITS_OWN}"
_INCLUDE = list_of(one_of(LOGPROBS, ENCRYPTED), f"a list of {LOGPROBS} and {ENCRYPTED}: {_WHY_NOTHING_ELSE}")
_STREAM_OPTIONS = record(include_obfuscation=Entry(one_of(False, why="events are sent as they are")))


def _field(name: str, read: Reader[Any], target: str | None, description: str = "", note: str = "") -> Field:
    return Field(name=name, read=read, target=target, description=description, note=note)


_OWN = (
    _field("input", read_input, "messages", "a string, or a list of 1 or more items"),
    _field("instructions", string, "instructions", "a system message before the input"),
    _field("max_output_tokens", integer(1, MAX_TOKENS), "sampling.max_tokens", "maximum number of tokens to generate"),
    _field("top_logprobs", integer(0, 20), "sampling.top_logprobs", f"alternatives a token; include has {LOGPROBS}"),
    _field("include", _INCLUDE, "include", "additional contents of the reply"),
    _field("text", read_text, "constraint.text", "the format of the text"),
    _field("tools", read_tools, "tools", "functions and custom tools that the model may call"),
    _field("tool_choice", read_tool_choice, "tool_choice", "default auto"),
    _field("parallel_tool_calls", boolean, "parallel_tool_calls", "false: at most one call; default true"),
    _field("reasoning", _REASONING, "reasoning", "how much the model reasons, if its chat template reads it"),
    _field(
        "truncation", _truncation, "sampling.error_behavior",
        "auto: cut the beginning of an input that exceeds the context (pay-per-token endpoints); default disabled",
    ),
    METADATA.replace(description=f"{METADATA.description}; the reply repeats them"),
    _field(
        "client_metadata",
        _client_metadata,
        "labels.tags.client_metadata",
        f"Codex's labels of its session: those of at most {MAX_TAG_VALUE} characters are recorded like metadata",
    ),
    _field("stream_options", _STREAM_OPTIONS, None, note="events are sent as they are"),
    _field("max_tool_calls", integer(1, MAX_TOKENS), "echoed.max_tool_calls", note="built-in tools; there are none"),
    _field("store", one_of(False, why=NOT_STORED), None, note="nothing is stored"),
    _field("background", one_of(False, why="a request is answered while it is open"), None, note="it never is"),
    _field(
        "service_tier", one_of("auto", "default", why="there is one tier"), None, note="there is one tier"
    ),
    _field("prompt_cache_key", string, "echoed.prompt_cache_key", note="a routing hint; not needed here"),
    _field(
        "prompt_cache_retention", one_of("in_memory", "24h"), "echoed.prompt_cache_retention",
        note="prefixes stay in memory while there is room",
    ),
    SAFETY_IDENTIFIER,
)  # fmt: skip
# Field names of chat completions that clients may send by mistake, and their names here.
_CHAT_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": f"include, with {LOGPROBS}",
}


def _named_otherwise(here: str) -> Reader[Any]:
    @reader(type="null")
    def read(value: Any, path: str) -> Any:
        error = InvalidField(path, value, f"null: this API has {here}")
        error.is_as_sent = True
        raise error

    return read


_REFUSED: Mapping[str, Reader[Any]] = {
    **{name: _named_otherwise(here) for name, here in _CHAT_NAMES.items()},
    "n": integer(1, 1),
    "previous_response_id": refused(NOT_STORED),
    "conversation": refused(NOT_STORED),
    "prompt": refused("prompts are not stored; send instructions and input"),
    "context_management": one_of([], why="conversations are not compacted"),
    "moderation": refused("texts are not moderated"),
    "prompt_cache_options": one_of({"mode": "implicit"}, why="every prefix is kept while there is room"),
}
# Fields of chat completions that both APIs have, or that clients of this one send as ``extra_body``.
_SHARED = (
    "model", "user", "stream", "temperature", "top_p", "cache_salt", "stop", "seed", "presence_penalty",
    "frequency_penalty", "logit_bias", "top_k", "min_p", "typical_p", "repetition_penalty", "min_tokens",
    "stop_token_ids", "bad_words", "no_repeat_ngram_size", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "timeout", "chat_template",
    "chat_template_kwargs", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_decoding_backend",
)  # fmt: skip

TABLE = Table(
    required="input",
    fields={field.name: field for field in (*_OWN, *(OPENAI["chat"].fields[name] for name in _SHARED))},
    refused=_REFUSED,
)
_COUNTED = (
    "input", "model", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning", "truncation",
    "cache_salt", "chat_template", "chat_template_kwargs",
)  # fmt: skip
# The fields of a request to count its tokens.
COUNT_TABLE = Table(
    required="input",
    fields={name: TABLE.fields[name] for name in _COUNTED},
    refused={name: _REFUSED[name] for name in ("previous_response_id", "conversation", "messages")},
)
# Fields that the reply repeats as they were sent. Fields that only the reply reads have a target in ``echoed``.
_SENT = (
    "instructions", "tool_choice", "parallel_tool_calls", "reasoning", "truncation", "user", "metadata",
    "safety_identifier",
)  # fmt: skip
_SHOWN: Mapping[str, Callable[[Any], Any]] = {"text": shown_text, "tools": shown_tools}


def read_count_request(body: dict[str, Any]) -> RawChat:
    """Read a body of ``/v1/responses/input_tokens``. Raises ``InvalidField``."""
    return read_response_request(body, COUNT_TABLE)


def read_response_request(body: dict[str, Any], table: Table = TABLE) -> RawChat:
    """Read a body of ``/v1/responses``, without changing it. Raises ``InvalidField``."""
    found = table.read(body)
    take_labels(found)
    sampling, echoed = _taken(found, "sampling."), _taken(found, "echoed.")
    echoed |= {name: body[name] for name in _SENT if body.get(name) is not None}
    echoed |= {name: show(body[name]) for name, show in _SHOWN.items() if body.get(name) is not None}
    echoed |= {"max_output_tokens": sampling.get("max_tokens"), "top_logprobs": sampling.get("top_logprobs") or 0}
    if named := namespaces(body.get("tools") or []):
        echoed[NAMESPACES] = named
    _ask_logprobs(sampling, found.pop("include", ()))
    if constraints := [one for one in _taken(found, "constraint.").values() if one is not None]:
        sampling["constraint"] = only(constraints)
    if "tool_choice" in found:
        found["tool_choice"] = chosen(found["tool_choice"], found.get("tools"))
    if (instructions := found.pop("instructions", None)) is not None:
        found["messages"] = (Message(role="system", content=instructions), *found["messages"])
    effort = found.pop("reasoning", {}).get("effort")
    return RawChat(
        sampling=msgspec.convert(sampling, RawSampling),
        reasoning_effort=effort,
        echoed=_json(echoed),
        **found,
    )


def _taken(found: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): found.pop(name) for name in list(found) if name.startswith(prefix)}


def _ask_logprobs(sampling: dict[str, Any], include: tuple[str, ...]) -> None:
    if LOGPROBS in include:
        sampling["logprobs"] = True
    elif asked := sampling.pop("top_logprobs", None):
        raise InvalidField("top_logprobs", asked, f"0 unless include has {LOGPROBS}")


def _json(echoed: dict[str, Any]) -> bytes:
    """Encode the repeated fields. Raises ``InvalidField`` for a field whose content JSON cannot represent."""
    for name, value in echoed.items():
        try:
            msgspec.json.encode(value)
        except (ValueError, OverflowError, RecursionError):  # half a surrogate pair, or a number out of range
            raise InvalidField(name, value, "valid Unicode texts, and numbers of 64 bits") from None
    return msgspec.json.encode(echoed)
