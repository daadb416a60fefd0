"""The parser's output for any model text, however it is split."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import unread_text
from reading_aloud import read, split

from mlflow_llm.serving.interface.request import ToolCall, ToolChoice, ToolUse
from mlflow_llm.serving.tool_calls.call_writer import written_calls
from mlflow_llm.serving.tool_calls.formats import FORMATS, REASONING
from mlflow_llm.serving.tool_calls.parser import call_id, make_parser, special_stand_ins
from mlflow_llm.serving.tool_calls.parts import CallArguments, CallBegin, Text

TYPES = {"x": ("integer",), "s": ("string",), "o": ("object",), "m": ("string", "null"), "b": ("boolean",)}
TOOLS = ToolUse(names=("f", "g", "sh"), custom=("sh",), types={"f": TYPES, "g": {}})
HERMES = FORMATS["hermes"]
THINKING = msgspec.structs.replace(HERMES, reasoning=REASONING["think"])
CODER = FORMATS["qwen3_coder"]

WRITTEN = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": 1, "s": "é"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=s>\né\n</parameter>\n"
    "</function>\n</tool_call>",
    "llama3_json": '{"name": "f", "parameters": {"x": 1, "s": "é"}}',
    "llama4_pythonic": "[f(x=1, s='é')]",
    "mistral_v3": '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1, "s": "é"}}]',
    "mistral_v11": '[TOOL_CALLS]f[ARGS]{"x": 1, "s": "é"}',
    "chatglm3": "f\n ```python\ntool_call(x=1, s='é')\n```",
    "glm4": 'f\n{"x": 1, "s": "é"}',
    "glm45": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n"
    "<arg_value>é</arg_value>\n</tool_call>",
    "granite3": '<|tool_call|>[{"name": "f", "arguments": {"x": 1, "s": "é"}}]',
    "phi4_mini": '<|tool_call|>[{"name": "f", "arguments": {"x": 1, "s": "é"}}]<|/tool_call|>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"x": 1, "s": "é"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1, "s": "é"}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1, "s": "é"}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"x": 1, "s": "é"}<|tool_call_end|><|tool_calls_section_end|>',
    "generic": '<tool_call>\n{"name": "f", "arguments": {"x": 1, "s": "é"}}\n</tool_call>',
}
ALSO = [
    ("phi4_mini", 'functools[{"name": "f", "arguments": {"x": 1, "s": "é"}}]'),
    ("granite3", '<tool_call>[{"name": "f", "arguments": {"x": 1, "s": "é"}}]'),
    ("granite3", '<|tool_call|>{"name": "f", "arguments": {"x": 1, "s": "é"}}'),
    ("mistral_v11", '[TOOL_CALLS]f{"x": 1, "s": "é"}'),
    ("llama3_json", '<|python_tag|>{"type": "function", "function": "f", "parameters": {"x": 1, "s": "é"}}'),
    (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"x": 1, "s": "é"}}}</tool_call>',
    ),
    ("hermes", '<tool_call>{"id": 3, "arguments": {"x": 1, "s": "é"}, "name": "f", "more": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1, \\"s\\": \\"\\u00e9\\"}"}</tool_call>'),
    (
        "glm45",
        "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value><arg_key>s</arg_key><arg_value>é</arg_value></tool_call>",
    ),
    ("llama4_pythonic", '<|python_start|>[ f ( x = 1 , s = """é""" , ) ]<|python_end|>'),
]


def _everywhere(text, format, tools=TOOLS, **options):
    """Parse ``text`` whole, check that every split in two and single characters give the same, and return it."""
    whole = read([text], format, tools, **options)
    assert read(list(text), format, tools, **options) == whole
    for place in range(len(text)):
        assert read(split(text, [place]), format, tools, **options) == whole
    return whole


def _calls(found):
    return [(name, json.loads(arguments)) for name, arguments, ended in found.calls if ended]


def test_every_format_is_tried():
    """Each format of the table has an example here."""
    assert set(WRITTEN) == set(FORMATS)


@pytest.mark.parametrize(("name", "text"), [*WRITTEN.items(), *ALSO])
def test_one_call(name, text):
    """One call in each of a family's forms is parsed with its arguments' types."""
    found = _everywhere(text, FORMATS[name])
    assert _calls(found) == [("f", {"x": 1, "s": "é"})]
    assert (found.text, found.reasoning) == ("", "")


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if not each.is_bare and name != "harmony"])
def test_text_around_calls(name):
    """Text before and after a call is text; white space that separates it from the call is not its end."""
    found = _everywhere("Let me see.\n\n" + WRITTEN[name] + "\n", FORMATS[name])
    assert found.text == "Let me see."
    assert len(found.calls) == 1
    after = _everywhere("before" + WRITTEN[name] + " after", FORMATS[name])
    assert after.text == "before after"


@pytest.mark.parametrize("name", FORMATS)
def test_plain_text(name):
    """Text that calls nothing comes out as it is, white space and all."""
    for text in (
        " \n a { b [ c < d\n\n",
        "f",
        "",
        "[]",
        "{}",
        '{"name": "f"}',
        '{"a": 1} is',
        "[1, 2]",
        "f is it",
        "```\nx\n```",
    ):
        assert _everywhere(text, FORMATS[name]).text == text
        assert _everywhere(text, FORMATS[name], None).text == text


@pytest.mark.parametrize("name", FORMATS)
def test_unknown_tools(name):
    """A call of a tool that was not offered is text, and so none is reported."""
    found = _everywhere(WRITTEN[name], FORMATS[name], ToolUse(names=("other",)))
    assert found.calls == []
    assert "é" in found.text


@pytest.mark.parametrize("name", FORMATS)
def test_cut_calls(name):
    """However early a text is cut, the output has no more than the text says, and no part of a marker."""
    text = WRITTEN[name]
    full = read([text], FORMATS[name], TOOLS).calls[0][1]
    for size in range(len(text)):
        found = read([text[:size]], FORMATS[name], TOOLS, cut=True)
        assert all(full.startswith(arguments) for _, arguments, _ in found.calls)
        if FORMATS[name].is_bare:
            continue  # the beginning of such a call looks like text
        whole = [each.strip() for each in FORMATS[name].literals if len(each.strip()) > 3]
        assert not any(marker in found.text for marker in whole)


def _written(format, count):
    calls = [ToolCall(id="", name="f", arguments={"x": 1, "s": "é"})] * count
    return written_calls(format, calls if format.parallel else calls[:1])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_cut_where_calls_are_required(name, count):
    """A required call that is cut anywhere leaves no beginning of a marker or of a call as text."""
    required = msgspec.structs.replace(TOOLS, choice=ToolChoice(mode="required"))
    for text in (WRITTEN[name], _written(FORMATS[name], count)):
        for size in range(len(text)):
            for pieces in ([text[:size]], list(text[:size])):
                found = read(pieces, FORMATS[name], required, cut=True)
                assert (found.text, found.reasoning) == ("", "")


def test_cut_where_a_model_may_call():
    """The beginning of a marker may be a text's end, but not after a call by a model that writes no text there."""
    assert read(["<tool_"], HERMES, TOOLS, cut=True).text == "<tool_"
    phi = FORMATS["phi4_mini"]
    assert read(["<|tool_"], phi, TOOLS, cut=True).text == "<|tool_"
    assert read([WRITTEN["phi4_mini"] + "<|tool_"], phi, TOOLS, cut=True).text == ""


def test_reasoning_that_is_cut_before_a_required_call():
    """The reasoning before a required call is reasoning up to its end, and the beginning of the call is nothing."""
    required = msgspec.structs.replace(TOOLS, choice=ToolChoice(mode="required"))
    cut = read(["<think>\nhm"], THINKING, required, cut=True)
    assert (cut.text, cut.reasoning) == ("", "hm")
    cut = read(["<think>\nhm\n</think>\n\n<tool"], THINKING, required, cut=True)
    assert (cut.text, cut.reasoning) == ("", "hm")


def test_several_calls():
    """Calls of a turn come one after the other, whether in one region, in a list, or each in its own."""
    two = [("f", {"x": 1}), ("g", {})]
    texts = {
        "hermes": '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
        "mistral_v3": '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": null}]',
        "mistral_v11": '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}',
        "llama3_json": '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
        "llama4_pythonic": "[f(x=1), g()]",
        "qwen3_coder": "<function=f><parameter=x>1</parameter></function><function=g></function></tool_call>",
        "glm45": "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>\n<tool_call>g</tool_call>",
    }
    for name, text in texts.items():
        assert _calls(_everywhere(text, FORMATS[name])) == two, name


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not JSON</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call><tool_call>",
        "a <tool_call",
    ],
)
def test_malformed_calls_are_text(text):
    """Text in which no call can be parsed is returned whole, with its markers."""
    found = _everywhere(text, HERMES)
    assert (found.calls, found.text) == ([], text)


def test_call_that_breaks():
    """A call whose arguments stop being JSON is output as far as they go, and what follows is text."""
    found = _everywhere('<tool_call>{"name": "f", "arguments": {"x": 1</tool_call> so', HERMES)
    assert found.calls == [["f", '{"x": 1', True]]
    assert found.text == "so"


def test_markers_in_strings():
    """A marker within a string of arguments, or within a parameter's text, ends nothing."""
    said = "a </tool_call> b <tool_call> </parameter> and </function> c"
    text = json.dumps({"name": "f", "arguments": {"s": said}})
    assert _calls(_everywhere(f"<tool_call>{text}</tool_call>", HERMES)) == [("f", {"s": said})]
    text = f"<tool_call>\n<function=f>\n<parameter=s>\n{said}\n</parameter>\n</function>\n</tool_call>"
    assert _calls(_everywhere(text, CODER)) == [("f", {"s": said})]


def test_arguments_are_as_written():
    """JSON arguments come out as the model wrote them, white space too."""
    written = '{ "x" :1,\n\t"s":  "\\u00e9" }'
    found = _everywhere(f'<tool_call>{{"name": "f", "arguments": {written} }}</tool_call>', HERMES)
    assert found.calls[0][1] == written


@pytest.mark.parametrize(
    ("parameter", "value", "expected"),
    [
        ("x", "7", 7),
        ("x", "7.0", 7),
        ("x", "1e3", 1000),
        ("x", "seven", "seven"),
        ("s", "7", "7"),
        ("s", "  two\n\nlines \n", "  two\n\nlines \n"),
        ("s", "", ""),
        ("s", 'say "a\\b"', 'say "a\\b"'),
        ("b", "True", True),
        ("b", "false", False),
        ("m", "null", None),
        ("m", "null and void", "null and void"),
        ("m", "7", "7"),
        ("o", '{"a": [1, 2.50, "é"]}', {"a": [1, 2.5, "é"]}),
        ("o", "{'a': (None, True)}", {"a": [None, True]}),
        ("o", "none", "none"),
        ("open", "7", 7),
        ("open", '{"a": 1}', {"a": 1}),
        ("open", "{not JSON", "{not JSON"),
        ("open", "text", "text"),
        ("open", "-", "-"),
        ("open", "null", None),
    ],
)
def test_types_of_parameters(parameter, value, expected):
    """A parameter's text gets the type of the tool's schema; without one it is JSON if it parses."""
    text = f"<function=f>\n<parameter={parameter}>\n{value}\n</parameter>\n</function>"
    ((_, arguments),) = _calls(_everywhere(text, CODER))
    assert arguments == {parameter: expected}
    assert type(arguments[parameter]) is type(expected)


def test_parameter_twice():
    """A parameter that is written twice has its first value: an object has no key twice."""
    text = "<function=f><parameter=s>a</parameter><parameter=s>b</parameter><parameter=x>1</parameter></function>"
    assert _calls(_everywhere(text, CODER)) == [("f", {"s": "a", "x": 1})]


def test_python_values():
    """Values as Python writes them become JSON, as they come."""
    text = r"""[f(a='\'\x41\u00e9\U0001F600\n', b=[1, (2,), {}], c={'k': None, 2: True}, d=-.5, e=1_000, """
    text += r"""g="\ud83d\ude00", h='')]"""
    ((_, arguments),) = _calls(_everywhere(text, FORMATS["llama4_pythonic"]))
    assert arguments == {
        "a": "'Aé😀\n",
        "b": [1, [2], {}],
        "c": {"k": None, "2": True},
        "d": -0.5,
        "e": 1000,
        "g": "😀",
        "h": "",
    }


@pytest.mark.parametrize("text", ["[f('x')]", "[f(x)]", "[f(1)]", "[f(**{})]", "[f(x==1)]", "[f"])
def test_python_that_is_not_a_call_is_text(text):
    """Only calls with keywords are calls; other Python at the beginning of a text is text."""
    found = _everywhere(text, FORMATS["llama4_pythonic"])
    arguments = "".join(arguments for _, arguments, _ in found.calls)
    assert found.text == text or arguments == '{"x": '


def test_custom_tools():
    """A custom tool's arguments are the one text in them, or the whole object if it has another form."""
    for said in ('ls "a"\n\\é😀', "", "\ud83d".encode(errors="replace").decode()):
        text = json.dumps({"name": "sh", "arguments": {"input": said}})
        found = _everywhere(f"<tool_call>{text}</tool_call>", HERMES)
        assert found.calls == [["sh", said, True]]
    other = '{"command": "ls"}'
    found = _everywhere(f'<tool_call>{{"name": "sh", "arguments": {other}}}</tool_call>', HERMES)
    assert found.calls == [["sh", other, True]]
    text = "<function=sh>\n<parameter=input>\nls\n-l\n</parameter>\n</function>"
    assert _everywhere(text, CODER).calls == [["sh", "ls\n-l", True]]


def test_reasoning():
    """Reasoning is what stands between its markers at the beginning, without the white space beside them."""
    found = _everywhere("<think>\n a\n\nb \n</think>\n\n c ", THINKING)
    assert (found.reasoning, found.text) == ("a\n\nb", "c ")
    found = _everywhere("a\n</think>\nb", THINKING, in_reasoning=True)
    assert (found.reasoning, found.text) == ("a", "b")
    found = _everywhere("<think>a", THINKING, cut=True)
    assert (found.reasoning, found.text) == ("a", "")
    spoken_of = "The tag <think> opens it, </think> ends it."
    assert _everywhere(spoken_of, THINKING).text == spoken_of
    without_tools = read(["<think>a</think>" + WRITTEN["hermes"]], THINKING, None)
    assert (without_tools.reasoning, without_tools.text) == ("a", WRITTEN["hermes"])


def test_calls_in_reasoning():
    """In formats whose models leave out the end of reasoning before a call, the call ends it; elsewhere it does not."""
    coder = msgspec.structs.replace(CODER, reasoning=REASONING["think"])
    found = _everywhere("Hm.\n" + WRITTEN["qwen3_coder"], coder, in_reasoning=True)
    assert (found.reasoning, _calls(found)) == ("Hm.", [("f", {"x": 1, "s": "é"})])
    found = _everywhere("Hm. <tool_call> it is </think> so", coder, in_reasoning=True)
    assert (found.reasoning, found.text) == ("Hm. <tool_call> it is", "so")
    found = _everywhere("Hm.\n" + WRITTEN["hermes"], THINKING, in_reasoning=True)
    assert (found.reasoning, found.calls) == ("Hm.\n" + WRITTEN["hermes"], [])


def test_special_tokens_are_not_spelt():
    """If a marker is a special token, ordinary text with the same characters is no marker."""
    format = FORMATS["mistral_v11"]
    specials = special_stand_ins(["[TOOL_CALLS]", "[ARGS]", "<s>"], format)
    assert set(specials) == {"[TOOL_CALLS]", "[ARGS]"}
    begin, args = specials["[TOOL_CALLS]"], specials["[ARGS]"]
    call = f'{begin}f{args}{{"s": "{begin}[ARGS]"}}'
    found = _everywhere('[TOOL_CALLS]f[ARGS]{"x": 1}' + call, format, specials=specials)
    assert found.text == '[TOOL_CALLS]f[ARGS]{"x": 1}'
    assert _calls(found) == [("f", {"s": "[TOOL_CALLS][ARGS]"})]
    assert _everywhere(f"a{args}b", format, specials=specials).text == "ab"
    assert _everywhere(f"a{args}b", format, specials=specials, show_special=True).text == "a[ARGS]b"


def test_one_call_alone():
    """Without parallel calls everything behind the first is left out."""
    tools = msgspec.structs.replace(TOOLS, parallel=False)
    for name, text in WRITTEN.items():
        found = _everywhere(text + "\n" + text + " and", FORMATS[name], tools)
        assert (len(found.calls), found.text) == (1, ""), name


def test_held_back_no_longer_than_needed():
    """Text goes out at once but for what may begin a marker, and arguments with each character."""
    parser = make_parser(HERMES, TOOLS)
    assert parser.push("Hi <tool") == [Text("Hi")]
    assert parser.push("s> ") == [Text(" <tools>")]
    assert parser.push('<tool_call>{"name": "f", "argum') == []
    assert parser.push('ents": {"x') == [CallBegin("f"), CallArguments('{"x')]
    assert parser.push('"') == [CallArguments('"')]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "piece", ["<", " ", "[", "{", '{"name": "f', "<tool_call>", "<|channel|>", "f(", "```", "a", "\\"]
)
def test_state_is_bounded(name, piece):
    """However long a text goes on, a parser keeps no more than a few kilobytes of it."""
    for begin in ("", WRITTEN[name][: WRITTEN[name].index("é")], WRITTEN[name][:-4]):
        parser = make_parser(FORMATS[name], TOOLS)
        parser.push(begin)
        for _ in range(20):
            parser.push(piece * 1000)
        assert len(unread_text(parser)) < 2000 + 1000 * len(piece) + len(begin)


def _pieces_of(format):
    literals = [each for each in format.literals if each]
    halves = [half for each in literals for half in (each[: len(each) // 2], each[len(each) // 2 :], each.strip())]
    own = [
        "f",
        "g",
        "{",
        "}",
        '{"x": 1}',
        '"',
        "\\",
        "\\u00",
        "[",
        "]",
        "(",
        ")",
        "x=",
        "'",
        ",",
        " ",
        "\n",
        "1",
        "null",
    ]
    return st.lists(st.sampled_from([*literals, *halves, *own, '{"name": "f", "arguments": ', "é"]), max_size=20)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_cut_changes_what_is_read(data):
    """Any text in any format is parsed alike however it is split."""
    format = FORMATS[data.draw(st.sampled_from(sorted(FORMATS)))]
    if format.reasoning is None and data.draw(st.booleans()):
        format = msgspec.structs.replace(format, reasoning=REASONING["think"])
    text = "".join(data.draw(_pieces_of(format)))
    cut = data.draw(st.booleans())
    whole = read([text], format, TOOLS, cut)
    assert read(list(text), format, TOOLS, cut) == whole
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert read(split(text, places), format, TOOLS, cut) == whole


def test_call_ids():
    """Ids differ by request, choice and call, and are 24 letters and digits after call_."""
    ids = {call_id(request, choice, call) for request in "ab" for choice in range(3) for call in range(3)}
    assert len(ids) == 18
    assert all(each.startswith("call_") and len(each) == 29 and each[5:].isalnum() for each in ids)
    assert call_id("a", 0, 0) in ids
