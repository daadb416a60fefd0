"""Tools and how they are chosen, as a chat request has them."""

import pytest
from tool_probes import ALLOWED, CUSTOM, NAMED, NAMED_CUSTOM, SCHEMA, TOOL

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.interface.constraint import Constraint
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import Tool, ToolCall, ToolChoice

HI = [{"role": "user", "content": "hi"}]


def _read(dialect="openai", **fields):
    return DIALECTS[dialect].read({"messages": HI, **fields})


def _refused(dialect="openai", **fields):
    with pytest.raises(InvalidField) as caught:
        _read(dialect, **fields)
    assert len(caught.value.message) < 500
    return caught.value


def _tool(name="f", **function):
    return {"type": "function", "function": {"name": name, "description": "d", **function}}


@pytest.mark.parametrize("dialect", ["openai", "databricks", "mlflow"])
def test_functions_are_read(dialect):
    """A function's name, description, parameters and ``strict`` are read; missing ones are None, or false."""
    raw = _read(dialect, tools=[TOOL, _tool()])
    assert raw.tools == (
        Tool(name="find", description="Find it.", parameters=SCHEMA, strict=True),
        Tool(name="f", description="d"),
    )
    assert (raw.tool_choice, raw.parallel_tool_calls) == (None, None)
    assert _read(dialect, tools=[TOOL], parallel_tool_calls=False).parallel_tool_calls is False


def test_custom_tools_are_read():
    """A custom tool takes any text or one of a grammar or regular expression, and errors name its path."""
    regex = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
    forms = [None, {"type": "text"}, regex]
    tools = [CUSTOM, *({"type": "custom", "custom": {"name": f"t{i}", "format": form}} for i, form in enumerate(forms))]
    raw = _read(tools=tools)
    where = "custom.format.grammar.definition"
    assert raw.tools[0] == Tool(
        kind="custom",
        name="run",
        description="Run it.",
        syntax=Constraint(kind="lark", value='start: "a"', field=f"tools[0].{where}"),
    )
    assert [tool.syntax for tool in raw.tools[1:3]] == [None, None]
    assert raw.tools[3].syntax == Constraint(kind="regex", value="a+", field=f"tools[3].{where}")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("none", ToolChoice(mode="none")),
        ("auto", ToolChoice(mode="auto")),
        ("required", ToolChoice(mode="required")),
        (NAMED, ToolChoice(mode="required", names=("find",), named=True)),
        (NAMED_CUSTOM, ToolChoice(mode="required", names=("run",), named=True)),
        (ALLOWED, ToolChoice(mode="auto", names=("find",))),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED_CUSTOM, NAMED, NAMED]}},
            ToolChoice(mode="required", names=("run", "find")),
        ),
    ],
)
def test_choices_are_read(given, expected):
    """A tool choice is a mode, one named tool or a subset; a subset of one is not a named choice."""
    assert _read(tools=[TOOL, CUSTOM], tool_choice=given).tool_choice == expected


@pytest.mark.parametrize(
    ("tools", "param", "words"),
    [
        ({}, "tools", "a list"),
        (["f"], "tools[0]", "an object"),
        ([{}], "tools[0].type", "function, custom"),
        ([{"type": "web_search"}], "tools[0].type", "function, custom"),
        ([{"type": "function"}], "tools[0].function", "an object"),
        ([{"type": "function", "name": "f"}], "tools[0].name", "no such field"),
        ([_tool(name="a b")], "tools[0].function.name", "letters"),
        ([_tool(name="x" * 65)], "tools[0].function.name", "1 to 64"),
        ([_tool(name=None)], "tools[0].function.name", "1 to 64"),
        ([_tool(colour=1)], "tools[0].function.colour", "no such field"),
        ([_tool(strict="yes")], "tools[0].function.strict", "true or false"),
        ([_tool(parameters=[])], "tools[0].function.parameters", "an object"),
        ([_tool(parameters={"type": "array"})], "tools[0].function.parameters.type", '"object"'),
        ([_tool(parameters={"properties": 5})], "tools[0].function.parameters.properties", "a schema for each name"),
        ([_tool(parameters={"properties": {"a": 5}})], "tools[0].function.parameters.properties.a", "a JSON schema"),
        ([_tool(parameters={"required": True})], "tools[0].function.parameters.required", "a list of the names"),
        ([_tool(parameters={"required": [1]})], "tools[0].function.parameters.required", "a list of the names"),
        ([_tool(), _tool()], "tools[1].function.name", "no other tool"),
        ([_tool(name="run"), CUSTOM], "tools[1].custom.name", "no other tool"),
        ([_tool(name=f"f{i}") for i in range(129)], "tools", "at most 128"),
        (
            [{"type": "custom", "custom": {"name": "c", "format": {"type": "xml"}}}],
            "tools[0].custom.format.type",
            "text, grammar",
        ),
        (
            [{"type": "custom", "custom": {"name": "c", "format": {"type": "grammar"}}}],
            "tools[0].custom.format.grammar",
            "syntax",
        ),
        (
            [
                {
                    "type": "custom",
                    "custom": {
                        "name": "c",
                        "format": {"type": "grammar", "grammar": {"syntax": "ebnf", "definition": "x"}},
                    },
                }
            ],
            "tools[0].custom.format.grammar.syntax",
            "lark, regex",
        ),
    ],
)
def test_bad_tools_are_named(tools, param, words):
    """An invalid tool is refused with the path of the fault and what is allowed there."""
    error = _refused(tools=tools)
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize(
    ("choice", "param", "words"),
    [
        ("any", "tool_choice", "none, auto, required"),
        ({"type": "function"}, "tool_choice.function", "an object with name"),
        ({"type": "function", "name": "find"}, "tool_choice.name", "no such field"),
        ({"type": "tool", "name": "find"}, "tool_choice.type", "function, custom, allowed_tools"),
        ({"type": "custom", "custom": {"name": "find"}}, "tool_choice.custom.name", "of that name is a function"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            "tool_choice.allowed_tools.tools",
            "1 to",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"tools": [NAMED]}},
            "tool_choice.allowed_tools.mode",
            "auto, required",
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [NAMED, {"type": "custom", "custom": {"name": "find"}}]},
            },
            "tool_choice.allowed_tools.tools[1].custom.name",
            "of that name is a function",
        ),
    ],
)
def test_bad_choices_are_named(choice, param, words):
    """An invalid choice is refused with its path; a tool of the other kind does not match the name."""
    error = _refused(tools=[TOOL], tool_choice=choice)
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize(
    ("tools", "param", "words"),
    [
        ([_tool(name=f"f{i}") for i in range(33)], "tools", "at most 32"),
        ([_tool(description=None)], "tools[0].function.description", "required"),
        ([_tool(description=" ")], "tools[0].function.description", "required"),
        (
            [_tool(parameters={"properties": {f"p{i}": {} for i in range(16)}})],
            "tools[0].function.parameters.properties",
            "at most 15",
        ),
        ([CUSTOM], "tools[0].type", '"function"'),
    ],
)
def test_databricks_bounds_are_its_own(tools, param, words):
    """Databricks' document bounds functions, their properties and descriptions; OpenAI's and MLflow's forms do not."""
    error = _refused("databricks", tools=tools)
    assert error.param == param
    assert words in error.message
    for dialect in ("openai", "mlflow"):
        assert len(_read(dialect, tools=tools).tools) == len(tools)


def test_custom_calls_come_back_as_messages():
    """A call of a custom tool that a client sends back has its text as the one argument of it."""
    call = {"id": "c1", "type": "custom", "custom": {"name": "run", "input": "ls"}}
    raw = DIALECTS["openai"].read({"messages": [*HI, {"role": "assistant", "tool_calls": [call]}]})
    assert raw.messages[1].tool_calls == (ToolCall(id="c1", name="run", arguments={"input": "ls"}),)
    with pytest.raises(InvalidField) as caught:
        DIALECTS["openai"].read(
            {"messages": [{"role": "assistant", "tool_calls": [{**call, "custom": {"name": "run"}}]}]}
        )
    assert caught.value.param == "messages[0].tool_calls[0].custom.input"


def test_what_tools_replaced_is_refused_by_their_name():
    """OpenAI's deprecated fields say what to use; tools have no place in completions."""
    for field, value in {"functions": [{"name": "f"}], "function_call": {"name": "f"}}.items():
        assert "tools and tool_choice" in _refused(**{field: value}).message
    with pytest.raises(InvalidField, match="tools are called in chats"):
        DIALECTS["openai"].read({"prompt": "x", "tools": [TOOL]})


def test_tools_are_no_default():
    """A model is not logged with tools: who calls it must know them. How its texts look may be logged."""
    from mlflow_llm.serving.dialects.fields.defaults import check_defaults

    for name, value in {"tools": [TOOL], "tool_choice": "auto"}.items():
        with pytest.raises(InvalidField, match="no such field"):
            check_defaults({name: value})
    check_defaults({"response_format": {"type": "json_object"}, "parallel_tool_calls": False})
