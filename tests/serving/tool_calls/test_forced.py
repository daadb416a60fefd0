"""Calls as grammars: whatever is drawn within one is read as calls of the tools, with arguments that are valid."""

import json

import jsonschema
import pytest
from drawing import vocabulary
from msgspec.structs import replace

from mlflow_llm.serving.interface.constraint import Constraint
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import Tool, ToolCall, ToolChoice, ToolUse
from mlflow_llm.serving.structured.grammar import grammar_of
from mlflow_llm.serving.tool_calls.argument_types import argument_types
from mlflow_llm.serving.tool_calls.call_grammar import MAX_CALLS, call_grammar
from mlflow_llm.serving.tool_calls.call_writer import written_calls
from mlflow_llm.serving.tool_calls.formats import FORMATS, REASONING

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"enum": ["C", "F"]},
            "detail": {"type": "boolean"},
        },
        "required": ["city", "unit"],
    },
    strict=True,
)
SEARCH = Tool(
    name="search",
    parameters={
        "type": "object",
        "properties": {
            "q": {"type": "string", "minLength": 3, "maxLength": 8},
            "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"},
            "limit": {"type": ["integer", "null"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
            "range": {"$ref": "#/$defs/range"},
            "either": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "integer"}]},
            "day": {"type": "string", "format": "date"},
            "mixed": {"enum": ["3", "x", 4, None, True]},
        },
        "required": ["q", "tags", "code", "either", "mixed"],
        "additionalProperties": False,
        "$defs": {"range": {"type": "object", "properties": {"lo": {"type": "number"}}, "required": ["lo"]}},
    },
    strict=True,
)
NOW = Tool(name="now")
RUN = Tool(name="run", kind="custom")
TOOLS = (WEATHER, SEARCH, NOW, RUN)
REQUIRED = ToolChoice(mode="required")
NAMED = ToolChoice(mode="required", names=("search",), named=True)
AUTO = ToolChoice(mode="auto")
TEXT = Constraint(kind="json_schema", value={"type": "object", "properties": {"a": {"type": "integer"}}}, field="f")


def _use(choice, tools=TOOLS):
    called = [tool for tool in tools if not choice.names or tool.name in choice.names]
    custom = tuple(tool.name for tool in called if tool.kind == "custom")
    return ToolUse(
        names=tuple(tool.name for tool in called), custom=custom, types=argument_types(called), choice=choice
    )


def _check(calls, choice, tools=TOOLS):
    by_name = {tool.name: tool for tool in tools}
    for name, arguments, is_whole in calls:
        assert is_whole
        assert name in (choice.names or by_name)
        if by_name[name].kind == "function":
            jsonschema.validate(json.loads(arguments), by_name[name].parameters or {"maxProperties": 0})


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("choice", [REQUIRED, NAMED], ids=["required", "named"])
@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_are_valid(name, choice, special):
    """Forced output in each format, with special tokens or without, is only calls with valid arguments."""
    words, format = vocabulary(special), FORMATS[name]
    grammar = call_grammar(format, TOOLS, choice, special=words.special)
    for seed in range(3):
        ids, is_whole = words.draw(grammar, seed)
        if is_whole:
            found = words.read(ids, format, _use(choice))
            assert not found.text.strip()
            assert len(found.calls) == 1 if choice.named else found.calls
            _check(found.calls, choice)


@pytest.mark.parametrize("name", FORMATS)
def test_strict_tools_are_held_to_in_auto(name):
    """With tool choice auto the calls of strict tools are valid, and other text is free."""
    words, format = vocabulary(True), FORMATS[name]
    grammar = call_grammar(format, TOOLS, AUTO, special=words.special)
    for seed in range(3):
        ids, is_whole = words.draw(grammar, seed, stop=0.005)
        if is_whole:
            _check(words.read(ids, format, _use(AUTO)).calls, AUTO)


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_model_writes_is_allowed(name):
    """A call in the format's own form, alone or after a text, is accepted, and one of another name is not."""
    words, format = vocabulary(True), FORMATS[name]
    call = ToolCall(id="", name="get_weather", arguments={"city": "Rome", "unit": "C"})
    text = written_calls(format, (call,))
    channels = format.layout == "channels"
    forced = call_grammar(format, TOOLS, REQUIRED, special=words.special)
    auto = call_grammar(format, TOOLS, AUTO, special=words.special)
    assert words.accepts(forced, text)
    assert words.accepts(auto, text)
    assert not words.accepts(forced, "Hello.")
    assert words.accepts(auto, ("<|channel|>final<|message|>" if channels else "") + "Hello.")
    if format.text_before and not channels:
        assert words.accepts(auto, "Let me see.\n" + text)
        wrong = written_calls(format, (replace(call, name="get_money"),))
        assert not words.accepts(auto, "Let me see.\n" + wrong)
        assert not words.accepts(auto, wrong)


@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if format.parallel])
def test_parallel_calls(name):
    """Several calls are allowed up to a bound if parallel calls are, otherwise one."""
    words, format = vocabulary(True), FORMATS[name]
    calls = [ToolCall(id="", name="now", arguments={})] * (MAX_CALLS + 1)
    for choice in (REQUIRED, AUTO):
        many = call_grammar(format, (NOW,), choice, special=words.special)
        if many is None:  # no grammar
            many = call_grammar(format, (replace(NOW, strict=True),), choice, special=words.special)
        one = call_grammar(format, (NOW,), choice, parallel=False, special=words.special)
        assert words.accepts(many, written_calls(format, calls[:3]))
        assert words.accepts(one, written_calls(format, calls[:1]))
        assert not words.accepts(one, written_calls(format, calls[:2]))
        assert not words.accepts(many, written_calls(format, calls))


def test_a_named_choice_is_one_call():
    """A named choice allows exactly one call of that function."""
    words, format = vocabulary(False), FORMATS["hermes"]
    grammar = call_grammar(format, (NOW, WEATHER), ToolChoice(mode="required", names=("now",), named=True))
    now = ToolCall(id="", name="now", arguments={})
    assert words.accepts(grammar, written_calls(format, [now]))
    assert not words.accepts(grammar, written_calls(format, [now, now]))
    assert not words.accepts(grammar, written_calls(format, [replace(now, name="get_weather")]))


def test_a_subset_that_may_be_called():
    """Tools outside the subset cannot be called, even if calls are not forced."""
    words, format = vocabulary(False), FORMATS["hermes"]
    grammar = call_grammar(format, (NOW, replace(NOW, name="then")), ToolChoice(mode="auto", names=("now",)))
    for name, allowed in (("now", True), ("then", False)):
        assert words.accepts(grammar, written_calls(format, [ToolCall(id="", name=name, arguments={})])) is allowed


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_or_else_a_text_of_a_form(name):
    """With response_format a reply is calls or a text of that form."""
    words, format = vocabulary(True), FORMATS[name]
    grammar = call_grammar(format, TOOLS, AUTO, response=grammar_of(TEXT), special=words.special)
    final = "<|channel|>final<|message|>" if format.layout == "channels" else ""
    assert words.accepts(grammar, final + '{"a": 1}')
    assert not words.accepts(grammar, final + '{"b": 1}')
    assert not words.accepts(grammar, final + "Hello.")
    call = ToolCall(id="", name="get_weather", arguments={"city": "Rome", "unit": "C"})
    marked = replace(format, begin=tuple(filter(None, format.begin)))
    assert words.accepts(grammar, written_calls(marked, (call,)))


def test_unconstrained_tools_need_no_grammar():
    """Optional, parallel calls of tools that are not strict have no grammar."""
    assert call_grammar(FORMATS["hermes"], (NOW, RUN)) is None
    assert call_grammar(FORMATS["hermes"]) is None
    assert call_grammar(FORMATS["hermes"], TOOLS, ToolChoice(mode="none")) is None
    response = grammar_of(TEXT)
    assert call_grammar(FORMATS["hermes"], response=response) is response


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
def test_reasoning_comes_first(special):
    """A model may reason before forced output, and continues reasoning that its prompt has opened."""
    words = vocabulary(False)
    format = replace(FORMATS["hermes"], reasoning=REASONING["think"])
    call = written_calls(format, [ToolCall(id="", name="now", arguments={})])
    grammar = call_grammar(format, (NOW,), REQUIRED)
    assert words.accepts(grammar, call)
    assert words.accepts(grammar, f"<think>\nI could say <tool_call>.\n</think>\n\n{call}")
    assert not words.accepts(grammar, f"<think>\nno end {call}")
    opened = call_grammar(format, (NOW,), REQUIRED, in_reasoning=True)
    assert words.accepts(opened, f"So.\n</think>\n\n{call}")
    assert not words.accepts(opened, call)
    answer = call_grammar(format, response=grammar_of(TEXT), in_reasoning=True)
    assert words.accepts(answer, 'So.\n</think>\n\n{"a": 1}')
    assert not words.accepts(answer, '{"a": 1}')


def test_special_tokens_are_tokens():
    """A marker that is a special token cannot be spelt with ordinary tokens."""
    words, format = vocabulary(True), FORMATS["mistral_v3"]
    grammar = call_grammar(format, (NOW,), REQUIRED, special=words.special)
    text = written_calls(format, [ToolCall(id="", name="now", arguments={})])
    matcher = words.matcher(grammar)
    assert words.accepts(grammar, text)
    assert matcher.validate_tokens(words.ids("[TOOL") + words.ids("_CALLS] ")) == 0


def test_a_text_may_speak_of_marks_that_are_tokens():
    """With auto, text that is spelt like a special token stays text."""
    words = vocabulary(True)
    grammar = call_grammar(FORMATS["mistral_v3"], (replace(NOW, strict=True),), AUTO, special=words.special)
    ids = words.ids("I write [TOOL") + words.ids("_CALLS] so")
    matcher = words.matcher(grammar)
    assert matcher.validate_tokens(ids) == len(ids)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"type": "object", "properties": {"a b": {"type": "string"}}}, "a b"),
        ({"type": "object", "patternProperties": {"^a": {"type": "string"}}}, "patternProperties"),
        ({"type": "object", "enum": [{"a": 1}]}, "the schema"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "llama4_pythonic"])
def test_schemas_that_only_json_can_express_are_refused(name, parameters, named):
    """Names and rules that a format other than JSON cannot express are refused with their path."""
    with pytest.raises(InvalidField, match=FORMATS[name].name) as caught:
        call_grammar(FORMATS[name], (NOW, Tool(name="f", parameters=parameters)), REQUIRED)
    assert caught.value.param == "tools[1].function.parameters"
    assert named in caught.value.message
    assert call_grammar(FORMATS["hermes"], (Tool(name="f", parameters=parameters),), REQUIRED) is not None


def test_a_schema_that_nothing_satisfies_is_refused_by_its_tool():
    """A schema that nothing satisfies is refused with the path of the tool's parameters."""
    tool = Tool(name="f", parameters={"type": "object", "required": ["a"], "properties": {"a": False}})
    with pytest.raises(InvalidField) as caught:
        call_grammar(FORMATS["hermes"], (NOW, tool), REQUIRED)
    assert caught.value.param.startswith("tools[1].function.parameters")


def _custom(kind, value):
    return Tool(name="run", kind="custom", syntax=Constraint(kind=kind, value=value, field="tools[0].definition"))


@pytest.mark.parametrize("name", FORMATS)
def test_a_custom_tool_with_an_expression(name):
    """A custom tool's text matches its expression, whatever surrounds it."""
    words, format = vocabulary(True), FORMATS[name]
    tools = (_custom("regex", r'say "[a-z]{1,3}"\n?'),)
    grammar = call_grammar(format, tools, REQUIRED, parallel=False, special=words.special)
    for seed in range(2):
        ids, is_whole = words.draw(grammar, seed)
        assert is_whole
        [(called, text, _)] = words.read(ids, format, _use(REQUIRED, tools)).calls
        assert called == "run"
        assert text.startswith('say "')


@pytest.mark.parametrize("name", FORMATS)
def test_values_that_look_like_marks(name):
    """A schema value spelt like a special token is plain letters; one with a marker of the format is excluded where it
    is not quoted.
    """
    words, format = vocabulary(True), FORMATS[name]
    values = ["<|end|>", "[ARGS]", "x</tool_call>", "y</parameter>", "z</arg_value>", "w"]
    tools = (Tool(name="f", parameters={"type": "object", "properties": {"a": {"enum": values}}, "required": ["a"]}),)
    grammar = call_grammar(format, tools, REQUIRED, parallel=False, special=words.special)
    for seed in range(6):
        ids, is_whole = words.draw(grammar, seed)
        assert is_whole
        _check(words.read(ids, format, _use(REQUIRED, tools)).calls, REQUIRED, tools)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_texts_within_values_look_like_no_marks(name):
    """A text within a list or an object parameter contains no marker, at which a parser would end the value."""
    words, format = vocabulary(False), FORMATS[name]
    grammar = call_grammar(format, (SEARCH,), REQUIRED, parallel=False)
    head = written_calls(format, [ToolCall(id="", name="search", arguments={"q": "abc", "code": "AB1"})])
    head = head[: head.rindex("AB1") + 3] + format.value_end + format.parameter_begin + "tags" + format.key_end
    matcher = words.matcher(grammar)
    for text, is_allowed in (('["a<1', True), ('["</a', False), ('["<b', False)):
        ids = words.ids(head + text)
        assert (matcher.validate_tokens(ids) == len(ids)) is is_allowed
