"""Detects the format of a model's calls: from transformers' ``response_template`` if its tokenizer has one, otherwise
from its chat template and its vocabulary."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from msgspec.structs import replace

from ..interface.tool_format import Reasoning, ToolFormat
from .formats import FORMATS, REASONING

GENERIC = FORMATS["generic"]

# A template has the first format for which its text contains all of the first marks and none of the second ones.
_MARKS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>", "commentary"), ()),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"), ()),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"), ()),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"), ()),
    ("glm45", ("<tool_call>", "<arg_key>"), ()),
    ("qwen3_coder", ("<function=", "<parameter="), ()),
    ("mistral_v11", ("[TOOL_CALLS]", "[ARGS]"), ()),
    ("mistral_v3", ("[TOOL_CALLS]",), ()),
    ("phi4_mini", ("<|tool|>", "<|/tool|>"), ()),
    ("granite3", ("<|tool_call|>",), ()),
    ("granite3", ("<|start_of_role|>", "tools"), ("</tool_call>",)),
    ("hermes", ("<tool_call>", "</tool_call>"), ()),
    ("llama4_pythonic", ("func_name1(params_name1",), ()),
    ("llama4_pythonic", ("<|python_start|>",), ('"parameters": ',)),
    ("llama3_json", ('"parameters": ', "<|start_header_id|>"), ()),
    ("llama3_json", ('"parameters": ', "<|header_start|>"), ()),
    ("llama3_json", ('"parameters": ', "<|python_tag|>"), ()),
    ("chatglm3", ("tool_call(", "<|observation|>"), ()),
    ("glm4", ("<|observation|>", "tools"), ()),
)


def detect(source: str, tokens: Collection[str] = (), response: Mapping[str, Any] | None = None) -> ToolFormat | None:
    """Return the format of calls and reasoning in the chat template ``source``; None if it is unknown.

    ``tokens`` are the tokenizer's special and added tokens, ``response`` is its ``response_template``.
    """
    if response is not None and (found := _of_response(response)) is not None:
        return _reasoning(found, source, tokens, response)
    name = _marked(source)
    return None if name is None else _reasoning(FORMATS[name], source, tokens, response)


def detect_or_generic(source: str, tokens: Collection[str] = (), response: Any = None) -> ToolFormat:
    """Return what ``detect`` returns, or the generic format if the template's is unknown. ``response`` is untrusted."""
    table = response if isinstance(response, Mapping) else None
    return detect(source, tokens, table) or _reasoning(GENERIC, source, tokens, table)


def formats_of(templates: Mapping[str, str], tokenizer: Any, given: ToolFormat | None = None) -> dict[str, ToolFormat]:
    """Return the format of each chat template of a transformers tokenizer, by the template's name.

    If ``given`` is not None, all of them have that format. The model's reasoning is added unless ``given`` has its own.
    """
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values()]
    response = getattr(tokenizer, "response_template", None)
    table = response if isinstance(response, Mapping) else None
    return {
        name: detect_or_generic(source, tokens, response) if given is None else _reasoning(given, source, tokens, table)
        for name, source in templates.items()
    }


def _marked(text: str) -> str | None:
    for name, marks, others in _MARKS:
        if all(mark in text for mark in marks) and not any(mark in text for mark in others):
            return name
    return None


def _of_response(response: Mapping[str, Any]) -> ToolFormat | None:
    """Return the format of the field "tool_calls"; None if it is unknown.

    It is a known format, found by its marks, or a new one if each call is a JSON object between literal markers.
    """
    field = _field(response, "tool_calls")
    if field is None:
        return None
    if (name := _marked(_unescaped(field))) is not None:
        return FORMATS[name]
    begin, end = field.get("open"), field.get("close")
    begins = (begin,) if isinstance(begin, str) else tuple(begin or ()) if isinstance(begin, list) else ()
    plain = field.get("content") == "json" and not field.get("content_args")
    if not begins or not isinstance(end, str) or not plain or not _is_call(field.get("transform")):
        return None
    return ToolFormat(
        name="response_template", layout="object", begin=begins, end=end, one_per_region=True, separator="\n"
    )


def _is_call(transform: Any) -> bool:
    return isinstance(transform, Mapping) and transform.get("function") == "{content}"


def _field(response: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    fields = response.get("fields")
    found = fields.get(name) if isinstance(fields, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _unescaped(value: Any) -> str:
    """Return all strings in ``value``, with regular-expression escapes removed, to search for marks in them."""
    if isinstance(value, str):
        return re.sub(r"\\(.)", r"\1", value)
    entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return "\n".join(map(_unescaped, entries))


def _reasoning(
    format: ToolFormat, source: str, tokens: Collection[str], response: Mapping[str, Any] | None
) -> ToolFormat:
    if format.reasoning is not None:
        return format
    found = _of_field(response) or _marked_reasoning(source, tokens)
    return format if found is None else replace(format, reasoning=found)


def _of_field(response: Mapping[str, Any] | None) -> Reasoning | None:
    for name in ("reasoning_content", "thinking", "reasoning"):
        field = None if response is None else _field(response, name)
        if field is None:
            continue
        begin, end = field.get("open"), field.get("close")
        if isinstance(begin, str) and isinstance(end, str):
            known = (each for each in REASONING.values() if (each.begin.strip(), each.end.strip()) == (begin, end))
            return next(known, Reasoning(begin=begin, end=end))
    return None


def _marked_reasoning(source: str, tokens: Collection[str]) -> Reasoning | None:
    for known in REASONING.values():
        begin, end = known.begin.strip(), known.end.strip()
        if (begin in tokens and end in tokens) or end in source:
            return known
    return None
