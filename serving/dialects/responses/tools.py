"""Tools, tool choice and text format of the Responses API, which are flat where chat completions nest them.

Source of the format: the API reference of ``/v1/responses``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...interface.constraint import Constraint
from ...interface.errors import InvalidField
from ...interface.readers import (
    Entry,
    Reader,
    any_of,
    boolean,
    list_of,
    one_of,
    one_of_types,
    reader,
    record,
    refused,
    string,
    type_of,
)
from ...interface.request import Tool, ToolChoice
from ..fields.constraint_fields import NAME, json_object, written
from ..fields.tool_fields import (
    CHOICES,
    MAX_TOOLS,
    PARAMETERS,
    SYNTAXES,
    AskedChoice,
    Named,
    custom_syntax,
    tool_parameters,
)
from .input import NO_TOOLS_OF_ITS_OWN, joined

_NAMED = Entry(NAME, required="the name of the tool")


@reader(**PARAMETERS)
def _parameters(value: Any, path: str) -> dict[str, Any] | None:
    return tool_parameters(value, path, None)


_SHOWN = {
    "allowed_callers": Entry(one_of(["direct"], why=NO_TOOLS_OF_ITS_OWN)),
    "defer_loading": Entry(one_of(False, why="all tools are shown to the model")),
}
_FUNCTION = record(
    type=type_of("function"),
    name=_NAMED,
    description=Entry(string),
    parameters=Entry(_parameters, "the JSON schema of the object of its arguments"),
    strict=Entry(boolean, "the arguments must follow the schema; default true"),
    output_schema=Entry(refused("what a tool answers is not shown to the model beforehand")),
    **_SHOWN,
)
_GRAMMAR = record(
    type=type_of("grammar"),
    syntax=Entry(one_of(*SYNTAXES), required="one of " + ", ".join(SYNTAXES)),
    definition=Entry(written, required="the grammar, or the expression"),
)
_CUSTOM = record(
    type=type_of("custom"),
    name=_NAMED,
    description=Entry(string),
    format=Entry(
        one_of_types({"text": record(type=type_of("text")), "grammar": _GRAMMAR}, {}, "an object"),
        "any text by default",
    ),
    **_SHOWN,
)
_HOSTED = (
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search",
    "code_interpreter", "computer", "computer_use_preview", "mcp", "image_generation", "local_shell", "shell",
    "apply_patch", "tool_search", "programmatic_tool_calling",
)  # fmt: skip
# Codex sends web_search by default; its option is in config.toml.
_SEARCH = f'{NO_TOOLS_OF_ITS_OWN} (Codex leaves it out with web_search = "disabled")'
_REFUSED = {kind: _SEARCH if kind == "web_search" else NO_TOOLS_OF_ITS_OWN for kind in _HOSTED}
_KINDS = {"function": _FUNCTION, "custom": _CUSTOM}
_ENTRY = one_of_types(_KINDS, _REFUSED, "a tool")
_NAMESPACE = record(
    type=type_of("namespace"),
    name=Entry(NAME, required="the name of the namespace"),
    description=Entry(string, "shown to the model with the first of its tools"),
    tools=Entry(
        list_of(_ENTRY, f"a list of 1 to {MAX_TOOLS} tools", minimum=1, maximum=MAX_TOOLS),
        required="its functions and custom tools",
    ),
)
_TOOL = one_of_types({**_KINDS, "namespace": _NAMESPACE}, _REFUSED, "a tool")


@reader(**_TOOL.schema)
def _tools_of(value: Any, path: str) -> tuple[tuple[str, Tool], ...]:
    """Read an entry of ``tools``: a tool or all those of a namespace, each with the path of its name.

    Chat templates know no namespaces: the name that the model reads and writes has the namespace's before it.
    """
    found = _TOOL(value, path)
    if found["type"] != "namespace":
        return ((f"{path}.name", _tool(found, path)),)
    name, tools = found["name"], []
    for i, entry in enumerate(found["tools"]):
        where = f"{path}.tools[{i}]"
        tool = _tool(entry, where)
        described = tool.description
        if i == 0 and found.get("description"):
            described = "\n\n".join(filter(None, (f"Tools of {name}: {found['description']}", described)))
        tool = msgspec.structs.replace(tool, name=joined(name, tool.name), description=described)
        tools.append((f"{where}.name", tool))
    return tuple(tools)


def _tool(found: dict[str, Any], path: str) -> Tool:
    custom, form = found["type"] == "custom", found.get("format", {})
    syntax = None
    if form.get("type") == "grammar":
        syntax = custom_syntax({name: form[name] for name in ("syntax", "definition")}, f"{path}.format")
    return Tool(
        name=found["name"],
        kind=found["type"],
        description=found.get("description"),
        parameters=found.get("parameters"),
        strict=not custom and found.get("strict", True),
        syntax=syntax,
    )


_TOOLS = list_of(_tools_of, f"a list of at most {MAX_TOOLS} tools", maximum=MAX_TOOLS)


@reader(**_TOOLS.schema)
def read_tools(value: Any, path: str) -> tuple[Tool, ...]:
    """Read a list of tools. The schema cannot express that names must be distinct, nor how many tools there may be with
    those of namespaces."""
    tools = [tool for entry in _TOOLS(value, path) for tool in entry]
    if len(tools) > MAX_TOOLS:
        raise InvalidField(path, f"{len(tools)} tools", f"a list of at most {MAX_TOOLS} tools")
    seen: set[str] = set()
    for where, tool in tools:
        if tool.name in seen:
            raise InvalidField(where, tool.name, "a name that no tool before it has")
        seen.add(tool.name)
    return tuple(tool for _, tool in tools)


def namespaces(tools: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return, for the tools of namespaces by ``joined`` names, their namespaces and their own names."""
    return {
        joined(entry["name"], tool["name"]): (entry["name"], tool["name"])
        for entry in tools
        if entry["type"] == "namespace"
        for tool in entry["tools"]
    }


_NAMES: Mapping[str, Reader[dict[str, Any]]] = {
    kind: record(type=type_of(kind), name=_NAMED) for kind in ("function", "custom")
}
_ALLOWED = record(
    type=type_of("allowed_tools"),
    mode=Entry(one_of("auto", "required"), required="auto or required"),
    tools=Entry(
        list_of(
            one_of_types(_NAMES, _REFUSED, "a tool"), f"a list of 1 to {MAX_TOOLS} tools", minimum=1, maximum=MAX_TOOLS
        ),
        required="the tools that may be called, by type and name",
    ),
)
_WORDS = one_of(*CHOICES)
_OBJECTS = one_of_types({**_NAMES, "allowed_tools": _ALLOWED}, _REFUSED, "none, auto, required or an object")


@reader(**any_of(_WORDS.schema, _OBJECTS.schema))
def read_tool_choice(value: Any, path: str) -> AskedChoice:
    """Read a word, the tool to call, or the tools that may be called."""
    if isinstance(value, str):
        return AskedChoice(ToolChoice(mode=_WORDS(value, path)))
    found = _OBJECTS(value, path)
    if found["type"] != "allowed_tools":
        named = Named(found["name"], found["type"], f"{path}.name")
        return AskedChoice(ToolChoice(mode="required", names=(named.name,), named=True), (named,))
    allowed = tuple(Named(one["name"], one["type"], f"{path}.tools[{i}].name") for i, one in enumerate(found["tools"]))
    names = tuple(dict.fromkeys(named.name for named in allowed))
    return AskedChoice(ToolChoice(mode=found["mode"], names=names), allowed)


_SCHEMA_FORMAT = record(
    type=type_of("json_schema"),
    name=Entry(NAME, required="a name for the form"),
    schema=Entry(json_object, required="a JSON schema"),
    description=Entry(string, "for people; the model is held to the schema"),
    strict=Entry(boolean, "the text is held to the schema either way"),
)
_TEXT = record(
    format=Entry(
        one_of_types(
            {
                "text": record(type=type_of("text")),
                "json_object": record(type=type_of("json_object")),
                "json_schema": _SCHEMA_FORMAT,
            },
            {},
            "an object",
        ),
        "the format of the text",
    ),
    verbosity=Entry(one_of("medium", why="the model has no such setting")),
)


@reader(**_TEXT.schema)
def read_text(value: Any, path: str) -> Constraint | None:
    """Read the constraint on the text; None if the request has none."""
    found = _TEXT(value, path).get("format")
    if found is None:
        return None
    if found["type"] == "json_schema":
        return Constraint(kind="json_schema", value=found["schema"], field=f"{path}.format.schema")
    return Constraint(kind=found["type"], field=f"{path}.format")


_UNSAID = {"description": None, "parameters": None, "strict": True}


def shown_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools as a response repeats them: functions have their default values."""
    return [_UNSAID | _given(tool) if tool["type"] == "function" else tool for tool in tools]


def shown_text(given: dict[str, Any]) -> dict[str, Any]:
    """Return ``text`` as a response repeats it."""
    return {"format": {"type": "text"}, "verbosity": "medium"} | _given(given)


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
