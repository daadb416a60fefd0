"""Writes calls in a format, for templates that take calls as part of a message's text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..interface.request import ToolCall
from ..interface.tool_format import ToolFormat
from .trusted_text import ComposedText, TrustedText, joined


def written_calls(format: ToolFormat, calls: Sequence[ToolCall]) -> ComposedText:
    """Return the text with which a model of this format would make ``calls``."""
    begin = TrustedText(format.begin[0] if format.begin else "")
    end = TrustedText(format.end if begin else "")
    texts = [_call(format, call) for call in calls]
    if format.one_per_region:
        return joined(format.separator, [ComposedText(begin, text, end) for text in texts])
    found = joined(format.separator, texts)
    return (
        ComposedText(begin, TrustedText("["), found, TrustedText("]"), end)
        if format.array
        else ComposedText(begin, found, end)
    )


def _call(format: ToolFormat, call: ToolCall) -> ComposedText:
    if format.layout == "object":
        return ComposedText(_json({format.name_key: call.name, format.arguments_keys[0]: call.arguments}))
    name = ComposedText(TrustedText(format.call_begin), call.name, TrustedText(format.name_end))
    return ComposedText(name, _arguments(format, call.arguments), TrustedText(format.call_end))


def _arguments(format: ToolFormat, arguments: dict[str, Any]) -> str:
    if format.arguments == "json":
        return _json(arguments)
    if format.arguments == "keywords":
        return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return ComposedText(*(_parameter(format, name, value) for name, value in arguments.items()))


def _parameter(format: ToolFormat, name: str, value: Any) -> ComposedText:
    text = isinstance(value, str)
    key_end = format.key_end if text or not format.key_end_json else format.key_end_json
    head = ComposedText(TrustedText(format.parameter_begin), name, TrustedText(key_end))
    return ComposedText(head, value if text else _json(value), TrustedText(format.value_end))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
