"""Bodies of the Messages API, read into ``request.RawChat``.

Source of the format: the API references of ``/v1/messages`` and ``/v1/messages/count_tokens``. Every field is either
supported or refused by name; ``_REFUSED`` has the fields without a meaning on this server, with the reasons.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...interface.constraint import Constraint
from ...interface.errors import InvalidField
from ...interface.labels import Labels
from ...interface.readers import (
    Entry,
    boolean,
    integer,
    list_of,
    number,
    obj,
    one_of,
    one_of_types,
    reader,
    record,
    string,
    text,
    type_of,
)
from ...interface.request import RawChat, RawSampling, Tool, ToolChoice
from ..base import Headers
from ..fields.label_fields import USER, user
from ..fields.tables import MAX_TOKENS
from ..fields.text_readers import STOPS, stop_strings
from ..fields.tool_fields import PARAMETERS, tool_parameters
from .blocks import CACHE_CONTROL, MAX_NAME, NAME, NO_SERVER_TOOLS, SYSTEM_BLOCK, texts_or
from .messages import chat_of, read_turns, text_of

VERSION_HEADER = "anthropic-version"
# The first block of ``system`` that Claude Code sends by default: one line for the hosted service's accounts, with a
# version and a hash. It says nothing to a model, and because it changes between requests, no prefix of a prompt that
# begins with it would be found in the cache.
_BILLING_HEADER = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
# The newest removes temperature, top_p and top_k, which the hosted models no longer have; models here have them, so
# they are accepted in every version. The oldest differs in how it streams text completions, which are not served.
VERSIONS = ("2026-10-21", "2023-06-01", "2023-01-01")
MIN_BUDGET = 1024  # tokens of thinking
MAX_TOOLS = 4096

_HOSTED = "only the hosted service has it"
_REFUSED: Mapping[str, str] = {
    "container": NO_SERVER_TOOLS,
    "mcp_servers": "this server calls no others",
    "compaction": "a conversation is fed to the model as it is sent",
    "diagnostics": "requests are not compared with earlier ones",
    "inference_geo": _HOSTED,
    "user_profile_id": _HOSTED,
    "billing_policy": _HOSTED,
    "fallback_credit_token": _HOSTED,
    "fallbacks": "the model that is named answers, or none",
    "thread": "conversations are not stored",
}


@reader(**PARAMETERS, required=["type"])
def _input_schema(value: Any, path: str) -> dict[str, Any]:
    """Read the JSON schema of an object."""
    found = obj(value, path)
    if found.get("type") != "object":
        raise InvalidField(f"{path}.type", found.get("type"), '"object": a tool is called with an object')
    return tool_parameters(found, path, None) or {}


_TOOL = record(
    name=Entry(
        text(re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME}}}"), f"1 to {MAX_NAME} letters, digits, _ and -"),
        required="the name of the tool",
    ),
    description=Entry(string),
    input_schema=Entry(_input_schema, required="the JSON schema of the tool's input"),
    type=Entry(one_of("custom")),
    strict=Entry(boolean, "the input is held to its schema"),
    cache_control=Entry(CACHE_CONTROL, "a hint, which the prefix cache does not need"),
    defer_loading=Entry(one_of(False, why="all tools are shown to the model")),
    eager_input_streaming=Entry(one_of(True, why="input is streamed as it is generated")),
    allowed_callers=Entry(one_of(["direct"], why=NO_SERVER_TOOLS)),
    input_examples=Entry(one_of([], why="write them into the description")),
)


@reader(**_TOOL.schema)
def _tool(value: Any, path: str) -> Tool:
    if isinstance(value, dict) and value.get("type") not in (None, "custom"):
        raise InvalidField(f"{path}.type", value["type"], f'null or "custom": {NO_SERVER_TOOLS}')
    found = _TOOL(value, path)
    return Tool(
        name=found["name"],
        description=found.get("description"),
        parameters=found["input_schema"],
        strict=found.get("strict", False),
    )


_TOOLS = list_of(_tool, f"a list of at most {MAX_TOOLS} tools", maximum=MAX_TOOLS)

_PARALLEL = {"disable_parallel_tool_use": Entry(boolean, "one call at most")}
_TOOL_CHOICE = one_of_types(
    {
        "auto": record(type=type_of("auto"), **_PARALLEL),
        "any": record(type=type_of("any"), **_PARALLEL),
        "tool": record(type=type_of("tool"), name=Entry(NAME, required="the name of one of the tools"), **_PARALLEL),
        "none": record(type=type_of("none")),
    },
    {},
    "an object",
)

_DISPLAY = {"display": Entry(one_of("summarized", why="thinking is given as it is"))}
_THINKING = one_of_types(
    {
        "disabled": record(type=type_of("disabled")),
        "adaptive": record(type=type_of("adaptive"), **_DISPLAY),
        "enabled": record(
            type=type_of("enabled"),
            budget_tokens=Entry(
                integer(MIN_BUDGET, MAX_TOKENS),
                "a target, which the model does not know of; max_tokens is what bounds it",
                required=f"an integer of at least {MIN_BUDGET}",
            ),
            **_DISPLAY,
        ),
    },
    {"between_tools": "the model thinks before its answer or not at all"},
    "an object",
)

_FORMAT = record(
    type=type_of("json_schema"),
    schema=Entry(obj, required="a JSON schema"),
)
_OUTPUT_CONFIG = record(
    format=Entry(_FORMAT, "the text is held to this schema"),
    effort=Entry(one_of("high", why="the model has one level of effort")),
)

# Claude Code asks by default that all thinking is kept, which is what happens anyway.
_KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_CONTEXT_MANAGEMENT = one_of([], {}, {"edits": []}, _KEEPS_ALL, why="a conversation is fed to the model as it is sent")

_COUNTED = {
    "model": Entry(string, "endpoint, served entity, or endpoint:adapter", required="the name of an endpoint"),
    "messages": Entry(read_turns, required="a non-empty list of messages"),
    "system": Entry(texts_or(SYSTEM_BLOCK), "the system prompt: a string or text blocks"),
    "tools": Entry(_TOOLS, "the caller's tools that the model may use"),
    "tool_choice": Entry(_TOOL_CHOICE, "default auto"),
    "thinking": Entry(_THINKING, "whether the model reasons before it answers; by default as its chat template does"),
    "output_config": Entry(_OUTPUT_CONFIG),
    "output_format": Entry(_FORMAT, "the older name of output_config.format"),
    "context_management": Entry(_CONTEXT_MANAGEMENT),
    "cache_control": Entry(CACHE_CONTROL, "a hint, which the prefix cache does not need"),
    "speed": Entry(one_of("standard", why="there is one speed")),
    **{name: Entry(one_of([], {}, why=why)) for name, why in _REFUSED.items()},
}
COUNT_BODY = record(**_COUNTED)


@reader(**STOPS)
def _stop_sequences(value: Any, path: str) -> tuple[str, ...]:
    if isinstance(value, str):
        raise InvalidField(path, value, "a list of non-empty strings")
    return stop_strings(value, path)


BODY = record(
    **_COUNTED,
    max_tokens=Entry(
        integer(1, MAX_TOKENS),
        "maximum number of tokens to generate; reduced to the rest of the context",
        required=f"an integer in [1, {MAX_TOKENS}]",
    ),
    stream=Entry(boolean, "send server-sent events; default false"),
    stop_sequences=Entry(_stop_sequences, "strings that end the text and are not part of it"),
    temperature=Entry(number(0, 1), "sampling temperature; 0 is greedy; default 1, or the model's own"),
    top_p=Entry(number(0, 1, above=True), "nucleus sampling; default 1, or the model's own"),
    top_k=Entry(integer(0, MAX_TOKENS), "the k most probable tokens; 0 is all"),
    metadata=Entry(record(user_id=Entry(user, USER))),
    service_tier=Entry(one_of("auto", "standard_only", why="there is one tier")),
)


def check_headers(headers: Headers) -> None:
    """Raise ``InvalidField`` for an unknown version of the API.

    ``anthropic-beta`` is not read: the fields that a beta adds to a body are supported or refused by name.
    """
    version = headers.get(VERSION_HEADER)
    if version is not None and version not in VERSIONS:
        raise InvalidField(VERSION_HEADER, version, "one of " + ", ".join(VERSIONS))


def read_message_request(body: dict[str, Any]) -> RawChat:
    """Read a body of ``/v1/messages``. Raises ``InvalidField``."""
    found = BODY(body, "")
    max_tokens = found["max_tokens"]
    budget = found.get("thinking", {}).get("budget_tokens")
    if budget is not None and budget >= max_tokens:
        raise InvalidField("thinking.budget_tokens", budget, f"less than max_tokens ({max_tokens})")
    sampling = RawSampling(
        max_tokens=max_tokens,
        clip_max_tokens=True,
        temperature=found.get("temperature"),
        top_p=found.get("top_p"),
        top_k=found.get("top_k"),
        stop=found.get("stop_sequences"),
        constraint=_constraint(found),
    )
    user = found.get("metadata", {}).get("user_id")
    labels = Labels(user=user) if user else None
    return _chat(found, sampling, stream=found.get("stream", False), labels=labels)


def read_count_request(body: dict[str, Any]) -> RawChat:
    """Read a body of ``/v1/messages/count_tokens``. Raises ``InvalidField``."""
    found = COUNT_BODY(body, "")
    return _chat(found, RawSampling(constraint=_constraint(found)))


def _chat(found: dict[str, Any], sampling: RawSampling, **more: Any) -> RawChat:
    system = _without_billing_header(found.get("system"))
    chat = chat_of(found["messages"], text_of(system) if system else None)
    tools = found.get("tools", ())
    _check_names(tools)
    choice, parallel = _tool_choice(found.get("tool_choice"), tools)
    if chat.is_begun:
        _check_begun(sampling, choice)
    return RawChat(
        model=found["model"],
        messages=chat.messages,
        end="open" if chat.is_begun else "generation_prompt",
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        thinking=found.get("thinking", {}).get("type"),
        sampling=sampling,
        **more,
    )


def _without_billing_header(system: str | tuple[dict[str, Any], ...] | None) -> str | tuple[dict[str, Any], ...] | None:
    """Return ``system`` without a first block that is a billing header and nothing else."""
    if system and not isinstance(system, str) and _BILLING_HEADER.fullmatch(system[0]["text"]):
        return system[1:]
    return system


def _constraint(found: dict[str, Any]) -> Constraint | None:
    newer, older = found.get("output_config", {}).get("format"), found.get("output_format")
    if newer is not None and older is not None and newer != older:
        raise InvalidField("output_format", older, "the same as output_config.format, or only one of them")
    if newer is not None:
        return Constraint(kind="json_schema", value=newer["schema"], field="output_config.format.schema")
    if older is not None:
        return Constraint(kind="json_schema", value=older["schema"], field="output_format.schema")
    return None


def _check_names(tools: tuple[Tool, ...]) -> None:
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in seen:
            raise InvalidField(f"tools[{i}].name", tool.name, "a different name for each tool")
        seen.add(tool.name)


def _tool_choice(found: dict[str, Any] | None, tools: tuple[Tool, ...]) -> tuple[ToolChoice | None, bool | None]:
    """Return the choice, and whether several calls are allowed."""
    if found is None:
        return None, None
    kind = found["type"]
    parallel = False if found.get("disable_parallel_tool_use") else None
    if kind in ("any", "tool") and not tools:
        raise InvalidField("tool_choice.type", kind, '"auto" or "none" without tools')
    if kind == "tool":
        name = found["name"]
        if all(tool.name != name for tool in tools):
            raise InvalidField("tool_choice.name", name, "the name of one of the tools")
        return ToolChoice(mode="required", names=(name,), named=True), parallel
    if not tools:
        return None, None
    return ToolChoice(mode="required" if kind == "any" else kind), parallel


def _check_begun(sampling: RawSampling, choice: ToolChoice | None) -> None:
    """Raise ``InvalidField`` for constraints on a reply that the caller has begun.

    A constraint applies from the beginning of a reply, not from within a text that the caller has written.
    """
    allowed = "null where the last message is the assistant's, which the reply continues"
    if sampling.constraint is not None:
        raise InvalidField(sampling.constraint.field, sampling.constraint.value, allowed)
    if choice is not None and choice.mode == "required":
        raise InvalidField("tool_choice", choice.names[0] if choice.named else "any", allowed)
