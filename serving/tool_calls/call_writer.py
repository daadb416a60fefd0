"""Writes calls in a format, for templates that take calls as part of a message's text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..interface.request import ToolCall
from ..interface.tool_format import ToolFormat
from .trusted_text import Composed, Own, joined


def written_calls(format: ToolFormat, calls: Sequence[ToolCall]) -> Composed:
    """Return the text with which a model of this format would make ``calls``."""
    begin = Own(format.begin[0] if format.begin else "")
    end = Own(format.end if begin else "")
    texts = [_call(format, call) for call in calls]
    if format.one_per_region:
        return joined(format.separator, [Composed(begin, text, end) for text in texts])
    found = joined(format.separator, texts)
    return Composed(begin, Own("["), found, Own("]"), end) if format.array else Composed(begin, found, end)


def _call(format: ToolFormat, call: ToolCall) -> Composed:
    if format.layout == "object":
        return Composed(_json({format.name_key: call.name, format.arguments_keys[0]: call.arguments}))
    name = Composed(Own(format.call_begin), call.name, Own(format.name_end))
    return Composed(name, _arguments(format, call.arguments), Own(format.call_end))


def _arguments(format: ToolFormat, arguments: dict[str, Any]) -> str:
    if format.arguments == "json":
        return _json(arguments)
    if format.arguments == "keywords":
        return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return Composed(*(_parameter(format, name, value) for name, value in arguments.items()))


def _parameter(format: ToolFormat, name: str, value: Any) -> Composed:
    text = isinstance(value, str)
    key_end = format.key_end if text or not format.key_end_json else format.key_end_json
    head = Composed(Own(format.parameter_begin), name, Own(key_end))
    return Composed(head, value if text else _json(value), Own(format.value_end))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
