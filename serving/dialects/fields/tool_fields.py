"""Tools and tool choice of OpenAI's chat completions: ``tools`` and ``tool_choice``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ...interface.constraint import Constraint
from ...interface.errors import InvalidField
from ...interface.readers import Reader, any_of, boolean, or_null, reader, string
from ...interface.request import Tool, ToolChoice
from .constraint_fields import NAME, json_object

MAX_TOOLS = 128  # OpenAI's limit
CHOICES = ("none", "auto", "required")
Kind = Literal["function", "custom"]
SYNTAXES: Mapping[str, Literal["lark", "regex"]] = {"lark": "lark", "regex": "regex"}

_NAME: dict[str, Any] = dict(NAME.schema)
_TEXT_OR_NULL = {"type": ["string", "null"]}
_BLANK = re.compile(r"\s*")


class Bounds(NamedTuple):
    """A dialect's limits on tools, by default OpenAI's: how many tools, how many properties each may have, whether each
    needs a description, and whether custom tools are allowed."""

    maximum: int = MAX_TOOLS
    properties: int | None = None
    described: bool = False
    custom: bool = True


OPENAI = Bounds()
DATABRICKS = Bounds(maximum=32, properties=15, described=True, custom=False)


# The part of a function's parameter schema that is checked even if its arguments are not constrained to it.
PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "object"},
        "properties": or_null({"type": "object", "additionalProperties": {"type": ["object", "boolean"]}}),
        "required": or_null({"type": "array", "items": {"type": "string"}}),
    },
}


def _closed(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


def _function_schema(bounds: Bounds) -> dict[str, Any]:
    parameters = dict(PARAMETERS["properties"])
    if bounds.properties is not None:
        parameters["properties"] = parameters["properties"] | {"maxProperties": bounds.properties}
    described = {"type": "string", "pattern": r"\S"}
    function = _closed(
        ["name", "description"] if bounds.described else ["name"],
        name=_NAME,
        description=described if bounds.described else _TEXT_OR_NULL,
        parameters=or_null({"type": "object", "properties": parameters}),
        strict={"type": ["boolean", "null"]},
    )
    return _closed(["type", "function"], type={"const": "function"}, function=function)


_GRAMMAR_SCHEMA = _closed(
    ["syntax", "definition"], syntax={"enum": list(SYNTAXES)}, definition={"type": "string", "minLength": 1}
)
_FORM_SCHEMA = any_of(
    _closed(["type"], type={"const": "text"}, grammar={"type": "null"}),
    _closed(["type", "grammar"], type={"const": "grammar"}, grammar=_GRAMMAR_SCHEMA),
    {"type": "null"},
)
_CUSTOM_SCHEMA = _closed(
    ["type", "custom"],
    type={"const": "custom"},
    custom=_closed(["name"], name=_NAME, description=_TEXT_OR_NULL, format=_FORM_SCHEMA),
)


def tools_reader(bounds: Bounds = OPENAI) -> Reader[tuple[Tool, ...]]:
    """Return a reader of ``tools`` within ``bounds``. The schema cannot express that names must be distinct."""
    items = [_function_schema(bounds), *([_CUSTOM_SCHEMA] if bounds.custom else ())]

    @reader(type="array", items=any_of(*items), maxItems=bounds.maximum)
    def read(value: Any, path: str) -> tuple[Tool, ...]:
        if not isinstance(value, list | tuple):
            raise InvalidField(path, value, "a list of tools")
        if len(value) > bounds.maximum:
            raise InvalidField(path, f"{len(value)} tools", f"at most {bounds.maximum}")
        found: dict[str, Tool] = {}
        for i, entry in enumerate(value):
            tool = _tool(entry, f"{path}[{i}]", bounds)
            if tool.name in found:
                raise InvalidField(f"{path}[{i}].{tool.kind}.name", tool.name, "a name that no other tool has")
            found[tool.name] = tool
        return tuple(found.values())

    return read


def _tool(value: Any, path: str, bounds: Bounds) -> Tool:
    kinds = ("function", "custom") if bounds.custom else ("function",)
    kind, inner = _typed(value, path, kinds)
    where = f"{path}.{kind}"
    return _function(inner, where, bounds) if kind == "function" else _custom(inner, where)


def _typed(value: Any, path: str, kinds: Sequence[str]) -> tuple[str, Any]:
    """Return ``(kind, value[kind])`` of an object that has only ``type`` and the key of that name."""
    if not isinstance(value, dict):
        raise InvalidField(path, value, "an object with type and " + " or ".join(kinds))
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidField(f"{path}.type", kind, "one of " + ", ".join(kinds) if len(kinds) > 1 else f'"{kinds[0]}"')
    _known(value, path, ("type", kind))
    return kind, value.get(kind)


def _known(value: dict[str, Any], path: str, names: Sequence[str]) -> None:
    for name in value:
        if name not in names:
            raise InvalidField(
                f"{path}.{str(name)[:64]}", value[name], "no such field; expected one of " + ", ".join(names)
            )


def _function(value: Any, path: str, bounds: Bounds) -> Tool:
    if not isinstance(value, dict):
        raise InvalidField(path, value, "an object with name, description and parameters")
    _known(value, path, ("name", "description", "parameters", "strict"))
    return Tool(
        name=NAME(value.get("name"), f"{path}.name"),
        description=_description(value.get("description"), f"{path}.description", bounds.described),
        parameters=tool_parameters(value.get("parameters"), f"{path}.parameters", bounds.properties),
        strict=value.get("strict") is not None and boolean(value["strict"], f"{path}.strict"),
    )


def _description(value: Any, path: str, needed: bool) -> str | None:
    if needed and (value is None or (isinstance(value, str) and _BLANK.fullmatch(value))):
        raise InvalidField(path, value, "what the function does: it is required")
    return None if value is None else string(value, path)


def tool_parameters(value: Any, path: str, maximum: int | None) -> dict[str, Any] | None:
    """Read a parameter schema (``PARAMETERS``) of at most ``maximum`` properties (None: any number).

    Raises ``InvalidField``.
    """
    if value is None:
        return None
    found = json_object(value, path)
    if "type" in found and found["type"] != "object":
        raise InvalidField(f"{path}.type", found["type"], '"object": arguments have names')
    properties, required = found.get("properties"), found.get("required")
    if properties is not None:
        _check_properties(properties, f"{path}.properties", maximum)
    if required is not None and not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        raise InvalidField(f"{path}.required", required, "a list of the names of properties")
    return found


def _check_properties(properties: Any, path: str, maximum: int | None) -> None:
    if not isinstance(properties, dict):
        raise InvalidField(path, properties, "an object with a schema for each name")
    if maximum is not None and len(properties) > maximum:
        raise InvalidField(path, f"{len(properties)} properties", f"at most {maximum}")
    for name, schema in properties.items():
        if not isinstance(schema, dict | bool):
            raise InvalidField(f"{path}.{name[:64]}", schema, "a JSON schema: an object, true or false")


def _custom(value: Any, path: str) -> Tool:
    if not isinstance(value, dict):
        raise InvalidField(path, value, "an object with name, description and format")
    _known(value, path, ("name", "description", "format"))
    return Tool(
        kind="custom",
        name=NAME(value.get("name"), f"{path}.name"),
        description=_description(value.get("description"), f"{path}.description", needed=False),
        syntax=None if value.get("format") is None else _syntax(value["format"], f"{path}.format"),
    )


def _syntax(value: Any, path: str) -> Constraint | None:
    if not isinstance(value, dict):
        raise InvalidField(path, value, 'an object such as {"type": "text"}')
    _known(value, path, ("type", "grammar"))
    kind, grammar = value.get("type"), value.get("grammar")
    if kind == "text" and grammar is None:
        return None
    if kind == "text":
        raise InvalidField(f"{path}.grammar", grammar, "null with type text")
    if kind != "grammar":
        raise InvalidField(f"{path}.type", kind, "one of text, grammar")
    return custom_syntax(grammar, f"{path}.grammar")


def custom_syntax(value: Any, path: str) -> Constraint:
    """Read the form of a custom tool's text: ``{"syntax": "lark" or "regex", "definition": …}``."""
    if not isinstance(value, dict):
        raise InvalidField(path, value, "an object with syntax and definition")
    _known(value, path, ("syntax", "definition"))
    syntax, definition = value.get("syntax"), value.get("definition")
    if not isinstance(syntax, str) or syntax not in SYNTAXES:
        raise InvalidField(f"{path}.syntax", syntax, "one of " + ", ".join(SYNTAXES))
    if not isinstance(definition, str) or not definition:
        raise InvalidField(f"{path}.definition", definition, f"a {syntax} that is not empty")
    return Constraint(kind=SYNTAXES[syntax], value=string(definition, f"{path}.definition"), field=f"{path}.definition")


class Named(NamedTuple):
    """A tool that a choice names, and the path of the name in the request."""

    name: str
    kind: str
    path: str


class AskedChoice(NamedTuple):
    """A ``tool_choice`` and the tools that it names, which ``chosen`` compares with the request's tools."""

    choice: ToolChoice
    named: tuple[Named, ...] = ()


def _reference(kind: str) -> dict[str, Any]:
    return _closed(["type", kind], type={"const": kind}, **{kind: _closed(["name"], name=_NAME)})


_REFERENCES = [_reference("function"), _reference("custom")]
_ALLOWED = _closed(
    ["mode", "tools"],
    mode={"enum": ["auto", "required"]},
    tools={"type": "array", "items": any_of(*_REFERENCES), "minItems": 1, "maxItems": MAX_TOOLS},
)
_ALLOWED_SCHEMA = _closed(["type", "allowed_tools"], type={"const": "allowed_tools"}, allowed_tools=_ALLOWED)


@reader(**any_of({"enum": list(CHOICES)}, *_REFERENCES, _ALLOWED_SCHEMA))
def tool_choice(value: Any, path: str) -> AskedChoice:
    """Read a word, the tool to call, or the tools that may be called."""
    if isinstance(value, str) and value in CHOICES:
        words: Mapping[str, ToolChoice] = {
            "none": ToolChoice(mode="none"),
            "auto": ToolChoice(mode="auto"),
            "required": ToolChoice(mode="required"),
        }
        return AskedChoice(words[value])
    if not isinstance(value, dict):
        raise InvalidField(path, value, "none, auto, required, or an object that names a tool")
    kind, inner = _typed(value, path, ("function", "custom", "allowed_tools"))
    if kind == "allowed_tools":
        return _allowed(inner, f"{path}.allowed_tools")
    named = _named(value, path)
    return AskedChoice(ToolChoice(mode="required", names=(named.name,), named=True), (named,))


def _named(value: Any, path: str) -> Named:
    kind, inner = _typed(value, path, ("function", "custom"))
    where = f"{path}.{kind}"
    if not isinstance(inner, dict):
        raise InvalidField(where, inner, "an object with name")
    _known(inner, where, ("name",))
    return Named(NAME(inner.get("name"), f"{where}.name"), kind, f"{where}.name")


def _allowed(value: Any, path: str) -> AskedChoice:
    if not isinstance(value, dict):
        raise InvalidField(path, value, "an object with mode and tools")
    _known(value, path, ("mode", "tools"))
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidField(f"{path}.mode", mode, "one of auto, required")
    if not isinstance(tools, list | tuple) or not 1 <= len(tools) <= MAX_TOOLS:
        raise InvalidField(f"{path}.tools", tools, f"a list of 1 to {MAX_TOOLS} tools, by their names")
    named = tuple(_named(entry, f"{path}.tools[{i}]") for i, entry in enumerate(tools))
    names = tuple(dict.fromkeys(each.name for each in named))
    return AskedChoice(ToolChoice(mode="auto" if mode == "auto" else "required", names=names), named)


def chosen(asked: AskedChoice, tools: Sequence[Tool] | None) -> ToolChoice:
    """Return the choice. Raises ``InvalidField`` if a tool that it names is of the other kind; ``tasks.prepare`` checks
    that the tool exists."""
    kinds = {tool.name: tool.kind for tool in tools or ()}
    for named in asked.named:
        if kinds.get(named.name, named.kind) != named.kind:
            raise InvalidField(
                named.path, named.name, f"a {named.kind} tool; the tool of that name is a {kinds[named.name]}"
            )
    return asked.choice
