"""Guardrails before a request runs: its texts are masked, or it is refused."""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec.structs import replace

from ..interface.errors import InvalidField, RequestError
from ..interface.guardrails import TextRules
from ..interface.request import Message, Part, Raw, RawChat, RawCompletion, RawEmbedding, RawScore, TextPart, Tool
from .text_filter import TextFilter, filtered, filtered_json

R = TypeVar("R", bound=Raw)
ONLY_TEXT = "a text: the guardrails of this endpoint cannot read token ids"


def guarded(raw: R, rules: TextRules) -> R:
    """Return ``raw`` as ``rules`` leave it. Raises ``RequestError``, which names the rule that blocks it, never the
    text that the rule has found."""
    if rules.is_empty:
        return raw
    if raw.prompt_table is not None:
        raise InvalidField("prompt_table", "an array", "nothing: the guardrails of this endpoint cannot read vectors")
    return replace(raw, **_changes(raw, rules))


def _changes(raw: Raw, rules: TextRules) -> dict[str, Any]:
    if isinstance(raw, RawChat):
        more: dict[str, Any] = {"chat_template": _text_or_none(raw.chat_template, rules, "chat_template")}
        if raw.chat_template_kwargs is not None:
            more["chat_template_kwargs"] = _json(raw.chat_template_kwargs, rules, "chat_template_kwargs")
        if raw.tools is not None:
            more["tools"] = tuple(_tool(tool, rules) for tool in raw.tools)
        return more | {"messages": tuple(_message(one, rules) for one in raw.messages)}
    if isinstance(raw, RawCompletion):
        prompts = tuple(_prompt(prompt, rules, "prompt") for prompt in raw.prompts)
        return {"prompts": prompts, "suffix": _text_or_none(raw.suffix, rules, "suffix")}
    if isinstance(raw, RawEmbedding):
        inputs = tuple(_prompt(one, rules, "input") for one in raw.inputs)
        return {"inputs": inputs, "instruction": _text_or_none(raw.instruction, rules, "instruction")}
    if isinstance(raw, RawScore):
        names = zip(("queries", "documents"), raw.names, strict=True)
        return {field: tuple(_text(one, rules, name) for one in getattr(raw, field)) for field, name in names}
    return {}


def _check(blocked: str | None, field: str) -> None:
    if blocked is not None:
        raise RequestError(f"{field}: the input guardrail {blocked!r} of this endpoint blocks the request", param=field)


def _text(text: str, rules: TextRules, field: str) -> str:
    left, blocked = filtered(text, rules)
    _check(blocked, field)
    return left


def _text_or_none(text: str | None, rules: TextRules, field: str) -> str | None:
    return None if text is None else _text(text, rules, field)


def _json(value: Any, rules: TextRules, field: str) -> Any:
    left, blocked = filtered_json(value, rules)
    _check(blocked, field)
    return left


def _prompt(prompt: str | tuple[int, ...], rules: TextRules, field: str) -> str:
    if not isinstance(prompt, str):
        raise InvalidField(field, list(prompt), ONLY_TEXT)
    return _text(prompt, rules, field)


def _message(message: Message, rules: TextRules) -> Message:
    content = message.content
    return replace(
        message,
        content=_text(content, rules, "messages") if isinstance(content, str) else _parts(content, rules),
        name=_text_or_none(message.name, rules, "messages"),
        reasoning_content=_text_or_none(message.reasoning_content, rules, "messages"),
        tool_calls=tuple(
            replace(call, arguments=_json(call.arguments, rules, "messages")) for call in message.tool_calls
        ),
    )


def _parts(parts: tuple[Part, ...], rules: TextRules) -> tuple[Part, ...]:
    """Return the parts of a message. Its texts are read as one, since a template joins them."""
    whole, found = TextFilter(rules), list(parts)
    texts = [place for place, part in enumerate(parts) if isinstance(part, TextPart)]
    for place in texts:
        part = parts[place]
        assert isinstance(part, TextPart)
        found[place] = replace(part, text=whole.push(part.text, final=place == texts[-1]))
    _check(whole.blocked, "messages")
    return tuple(found)


def _tool(tool: Tool, rules: TextRules) -> Tool:
    description = _text_or_none(tool.description, rules, "tools")
    parameters = None if tool.parameters is None else _json(tool.parameters, rules, "tools")
    return replace(tool, description=description, parameters=parameters)
