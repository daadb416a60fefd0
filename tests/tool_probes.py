"""Valid and nearly valid values of the fields of tools and structured output, by the field's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}
FUNCTION = {"name": "find", "description": "Find it.", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
CUSTOM = {"type": "custom", "custom": {"name": "run", "description": "Run it.", "format": GRAMMAR}}
NAMED = {"type": "function", "function": {"name": "find"}}
NAMED_CUSTOM = {"type": "custom", "custom": {"name": "run"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
JUNK: Sequence[Any] = (None, True, 5, 0.5, "", "x", "a b", "x" * 65, [], ["x"], {}, {"x": 1})


def varied(value: Any) -> Iterator[Any]:
    """Yield ``value``, then without each key at every level, with junk in its place, and with a key too many."""
    yield value
    if isinstance(value, Mapping):
        yield {**value, "colour": 1}
        for key, inner in value.items():
            yield {name: entry for name, entry in value.items() if name != key}
            yield from ({**value, key: junk} for junk in JUNK)
            if isinstance(inner, Mapping | list):
                yield from ({**value, key: other} for other in varied(inner))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from ([*value[:i], other, *value[i + 1 :]] for other in varied(inner))


def _tool(**changed: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**FUNCTION, **changed}}


def _many(count: int) -> dict[str, Any]:
    return _tool(parameters={"type": "object", "properties": {f"p{i}": {} for i in range(count)}})


_FORMS = [*varied(FORM), {"type": "text", "json_schema": None}, {"type": "text", "json_schema": {}}]
_FORMS += [{"type": "structural_tag"}, {"type": "json_object", "colour": 1}, {"type": ["text"]}]
_SCHEMAS = [SCHEMA, {}, '{"type": "object"}', " {}\n", "[]", "true", "{", "[{}]"]
_CHOICES = [["a", "b"], ["a", ""], ["a", 1], ["a"] * 1024, ["a"] * 1025, "a", {"a": 1}]
_ONE = {"json": SCHEMA, "regex": "a+", "choice": ["a", "b"], "grammar": 'start: "a"', "json_object": True}
_BESIDE = ("whitespace_pattern", "structural_tag", "disable_fallback", "disable_any_whitespace", "colour")
_OUTPUTS = [{name: given} for name, value in _ONE.items() for given in (value, None, False, *JUNK)]
_OUTPUTS += [{"json": SCHEMA, name: value} for name, value in _ONE.items() if name != "json"]
_OUTPUTS += [
    {"regex": "a", name: given} for name in (*_BESIDE, *_ONE, "disable_additional_properties") for given in JUNK
]
_TOOLS = [[_tool(name=name)] for name in ("f", "f-1_B", "f.g", "f g", "é", "x" * 64, "x" * 65)]
_TOOLS += [[_tool(description=given)] for given in (None, "", "  \n", "x")]
_TOOLS += [
    [_tool(parameters=given)] for given in (None, {}, {"type": "array"}, {"properties": 3}, {"$ref": "#/$defs/a"})
]
_TOOLS += [[_many(count)] for count in (15, 16)]
_TOOLS += [[_tool(name=f"f{i}") for i in range(count)] for count in (32, 33, 128, 129)]
_CHOSEN = [
    {**ALLOWED, "allowed_tools": {"mode": mode, "tools": [NAMED, NAMED_CUSTOM]}}
    for mode in ("auto", "required", "none")
]

PROBES: Mapping[str, Sequence[Any]] = {
    "response_format": _FORMS,
    "structured_outputs": _OUTPUTS,
    "guided_json": _SCHEMAS,
    "guided_choice": _CHOICES,
    "guided_decoding_backend": ["auto", "guidance", "llguidance", "outlines"],
    "tools": [*varied([TOOL, CUSTOM]), *_TOOLS],
    "tool_choice": [*varied(NAMED), *varied(NAMED_CUSTOM), *varied(ALLOWED), *_CHOSEN, "required"],
    "function_call": ["auto", {"name": "f"}],
}
