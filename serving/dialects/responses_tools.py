"""Tools, the choice among them and the form of the text, as the Responses API has them: flat, where chats nest them.

Source of the format: the API reference of ``/v1/responses``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..constraint import Constraint
from ..errors import InvalidField
from ..readers import (
    Entry,
    any_of,
    boolean,
    list_of,
    obj,
    one_of,
    one_of_types,
    reader,
    record,
    refused,
    string,
    text,
    type_of,
)
from ..request import Tool, ToolChoice
from .responses_input import MAX_NAME, NO_TOOLS_OF_ITS_OWN

MAX_TOOLS = 4096

_NAME = text(re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME}}}"), f"1 to {MAX_NAME} letters, digits, _ and -")
_NAMED = Entry(_NAME, required="the name of the tool")
_SHOWN = {
    "allowed_callers": Entry(one_of(["direct"], why=NO_TOOLS_OF_ITS_OWN)),
    "defer_loading": Entry(one_of(False, why="all tools are shown to the model")),
}
_FUNCTION = record(
    type=type_of("function"),
    name=_NAMED,
    description=Entry(string),
    parameters=Entry(obj, "the JSON schema of the object of its arguments"),
    strict=Entry(boolean, "the arguments are held to the schema; true unless given"),
    output_schema=Entry(refused("what a tool answers is not shown to the model beforehand")),
    **_SHOWN,
)
_GRAMMAR = record(
    type=type_of("grammar"),
    syntax=Entry(one_of("lark", "regex"), required='"lark" or "regex"'),
    definition=Entry(string, required="the grammar, or the expression"),
)
_CUSTOM = record(
    type=type_of("custom"),
    name=_NAMED,
    description=Entry(string),
    format=Entry(
        one_of_types({"text": record(type=type_of("text")), "grammar": _GRAMMAR}, {}, "an object"),
        "any text unless given",
    ),
    **_SHOWN,
)
_HOSTED = (
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search",
    "code_interpreter", "computer", "computer_use_preview", "mcp", "image_generation", "local_shell", "shell",
    "apply_patch", "tool_search", "namespace", "programmatic_tool_calling",
)  # fmt: skip
_REFUSED = dict.fromkeys(_HOSTED, NO_TOOLS_OF_ITS_OWN)
_TOOL = one_of_types({"function": _FUNCTION, "custom": _CUSTOM}, _REFUSED, "a tool")


@reader(**_TOOL.schema)
def _tool(value: Any, path: str) -> Tool:
    found = _TOOL(value, path)
    custom, form = found["type"] == "custom", found.get("format", {})
    syntax = None
    if form.get("type") == "grammar":
        syntax = Constraint(kind=form["syntax"], value=form["definition"], field=f"{path}.format.definition")
    return Tool(
        name=found["name"],
        kind=found["type"],
        description=found.get("description"),
        parameters=found.get("parameters"),
        strict=not custom and found.get("strict", True),
        syntax=syntax,
    )


_TOOLS = list_of(_tool, f"a list of at most {MAX_TOOLS} tools", most=MAX_TOOLS)


@reader(**_TOOLS.schema)
def read_tools(value: Any, path: str) -> tuple[Tool, ...]:
    """What the schema cannot say: that no two tools have one name."""
    tools = _TOOLS(value, path)
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in seen:
            raise InvalidField(f"{path}[{i}].name", tool.name, "a name that no tool before it has")
        seen.add(tool.name)
    return tools


_CHOICE: Mapping[str, Any] = {
    "function": record(type=type_of("function"), name=_NAMED),
    "custom": record(type=type_of("custom"), name=_NAMED),
}
_ALLOWED = record(
    type=type_of("allowed_tools"),
    mode=Entry(one_of("auto", "required"), required='"auto" or "required"'),
    tools=Entry(
        list_of(one_of_types(_CHOICE, _REFUSED, "a tool"), "a list of at least one tool", least=1, most=MAX_TOOLS),
        required="the tools that may be called, by type and name",
    ),
)
_MODES = one_of("none", "auto", "required")
_OBJECTS = one_of_types({**_CHOICE, "allowed_tools": _ALLOWED}, _REFUSED, '"none", "auto", "required" or an object')


@reader(**any_of(_MODES.schema, _OBJECTS.schema))
def read_tool_choice(value: Any, path: str) -> ToolChoice:
    """Which tools there are is for ``check_choice`` to say."""
    if isinstance(value, str):
        return ToolChoice(mode=_MODES(value, path))
    found = _OBJECTS(value, path)
    if found["type"] == "allowed_tools":
        return ToolChoice(mode=found["mode"], names=tuple(dict.fromkeys(tool["name"] for tool in found["tools"])))
    return ToolChoice(mode="required", names=(found["name"],), named=True)


def check_choice(choice: ToolChoice, tools: tuple[Tool, ...], given: Any) -> None:
    """Raises ``InvalidField`` for a choice of what is not among ``tools``; ``given`` is the field as it was sent."""
    if choice.mode == "required" and not tools:
        raise InvalidField("tool_choice", given, "none or auto where there are no tools")
    entries = [] if isinstance(given, str) else given.get("tools", [given])
    kinds = {tool.name: tool.kind for tool in tools}
    for i, entry in enumerate(entries):
        if kinds.get(entry["name"]) != entry["type"]:
            path = "tool_choice.name" if entry is given else f"tool_choice.tools[{i}].name"
            raise InvalidField(path, entry["name"], f"the name of one of the tools of type {entry['type']}")


_SCHEMA_FORMAT = record(
    type=type_of("json_schema"),
    name=Entry(_NAME, required="a name of the format"),
    schema=Entry(obj, required="a JSON schema"),
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
        "what the text is held to",
    ),
    verbosity=Entry(one_of("medium", why="the model has no such setting")),
)


@reader(**_TEXT.schema)
def read_text(value: Any, path: str) -> Constraint | None:
    """What the text is held to; None for any text."""
    found = _TEXT(value, path).get("format", {"type": "text"})
    if found["type"] == "json_schema":
        return Constraint(kind="json_schema", value=found["schema"], field=f"{path}.format.schema")
    return Constraint(kind="json_object", field=f"{path}.format") if found["type"] == "json_object" else None
