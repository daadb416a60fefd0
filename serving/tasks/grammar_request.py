"""The form that the texts of a request must have: which tools may be called, and which grammar applies."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from msgspec import Struct

from ..interface.constraint import Constraint, ConstraintKind, Grammar
from ..interface.errors import InvalidField
from ..interface.request import RawChat, RawSampling, Tool, ToolChoice
from ..interface.tool_format import ToolFormat
from ..structured.grammar import grammar_of
from ..tool_calls.call_grammar import call_grammar
from .prompt.endpoint import EndpointView
from .prompt.tool_messages import shown_tools

MAX_CACHED_GRAMMARS = 64  # clients send the same ones repeatedly
MAX_CACHED_BYTES = 2**18  # of the JSON of a grammar that is cached
NO_GRAMMARS = "null: structured output is not supported by this endpoint's engine"


def check_choice(raw: RawChat) -> None:
    """Raise ``InvalidField`` if the request's tool choice names, or needs, a tool that does not exist."""
    if (choice := raw.tool_choice) is None:
        return
    known = [tool.name for tool in raw.tools or ()]
    if not known and choice.mode == "required" and not choice.names:
        raise InvalidField("tool_choice", "required", "none or auto: the request has no tools")
    for name in choice.names:
        if name not in known:
            listed = ", ".join(known[:16]) or "none"
            raise InvalidField("tool_choice", name, f"the name of one of the request's tools: {listed}")


def grammar(sampling: RawSampling, endpoint: EndpointView) -> Grammar | None:
    """Return the grammar of the format that a request asks for; None for any text.

    Raises ``InvalidField``, which names the field, and for a schema also the keyword and its place.
    """
    constraint = sampling.constraint
    if constraint is None or constraint.kind == "text":
        return None
    if not endpoint.info.capabilities.structured_output:
        raise InvalidField(constraint.field, constraint.kind, NO_GRAMMARS)
    value = msgspec.json.encode(constraint.value)
    if len(value) > MAX_CACHED_BYTES:
        return grammar_of(constraint)
    return _cached(constraint.kind, value, constraint.compact, constraint.field)


def chat_grammar(raw: RawChat, endpoint: EndpointView, format: ToolFormat, *, in_reasoning: bool) -> Grammar | None:
    """Return the grammar of a chat's texts; None for any text.

    It covers calls that are required or must be valid, the format of a text that is no call, and reasoning before them
    if the model reasons. Raises ``InvalidField``, which names the field.
    """
    response = grammar(raw.sampling, endpoint)
    tools = shown_tools(raw)
    if not tools and response is None:
        return None
    asked = _Asked(
        format=format,
        tools=tools,
        choice=raw.tool_choice,
        parallel=raw.parallel_tool_calls is not False,
        response=response,
        special=endpoint.text.special_tokens,
        in_reasoning=in_reasoning,
    )
    key = msgspec.json.encode(asked)
    found = _cached_calls(key) if len(key) <= MAX_CACHED_BYTES else _calls(asked)
    if found is not None and not endpoint.info.capabilities.structured_output:
        field, value = _why_held(raw)
        raise InvalidField(field, value, NO_GRAMMARS)
    return found


class _Asked(Struct, frozen=True):
    """The arguments of ``call_grammar``; their JSON is the key of the cache."""

    format: ToolFormat
    tools: tuple[Tool, ...]
    choice: ToolChoice | None
    parallel: bool
    response: Grammar | None
    special: dict[str, int]
    in_reasoning: bool


def _calls(asked: _Asked) -> Grammar | None:
    return call_grammar(
        asked.format,
        asked.tools,
        asked.choice,
        parallel=asked.parallel,
        response=asked.response,
        special=asked.special,
        in_reasoning=asked.in_reasoning,
    )


@functools.lru_cache(MAX_CACHED_GRAMMARS)
def _cached_calls(asked: bytes) -> Grammar | None:
    return _calls(msgspec.json.decode(asked, type=_Asked))


def _why_held(raw: RawChat) -> tuple[str, Any]:
    """Return the field because of which the chat needs a grammar for calls, and its value."""
    choice = raw.tool_choice
    if choice is not None and (choice.mode == "required" or choice.names):
        return "tool_choice", choice.names or choice.mode
    if raw.parallel_tool_calls is False:
        return "parallel_tool_calls", False
    for i, tool in enumerate(raw.tools or ()):
        if tool.strict:
            return f"tools[{i}].function.strict", True
        if tool.syntax is not None:
            return tool.syntax.field, tool.syntax.kind
    return "tools", "a form"


@functools.lru_cache(MAX_CACHED_GRAMMARS)
def _cached(kind: ConstraintKind, value: bytes, compact: bool, field: str) -> Grammar:
    return grammar_of(Constraint(kind=kind, value=msgspec.json.decode(value), compact=compact, field=field))
