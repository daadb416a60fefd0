"""Custom tools with a grammar in Lark's notation, in every format, judged by ``lark``."""

import json

import lark
import pytest
from drawing import vocabulary

from mlflow_llm.serving.interface.constraint import Constraint
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import Tool, ToolCall, ToolChoice, ToolUse
from mlflow_llm.serving.tool_calls.argument_types import argument_types
from mlflow_llm.serving.tool_calls.call_grammar import call_grammar
from mlflow_llm.serving.tool_calls.call_writer import written_calls
from mlflow_llm.serving.tool_calls.formats import FORMATS

REQUIRED = ToolChoice(mode="required")
FIELD = "tools[0].custom.format.grammar.definition"
GRAMMARS = {
    "arithmetic": r"""
start: expr
expr: term (SP ADD SP term)*
term: factor (SP MUL SP factor)*
factor: INT | "(" expr ")"
SP: " "
ADD: "+"
MUL: "*"
%import common.INT
""",
    "patch": r"""
start: begin hunk~1..2 end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Add File: " /[a-zé .\/\\]{1,8}/ LF line~1..3 | "@@" LF line
line: ("+" | "-" | " ") /.{1,4}/? LF -> line
%import common.LF
""",
    "sql": r"""
start: "SELECT" COLUMNS "FROM" NAME ("WHERE" NAME "=" (ESCAPED_STRING | NUMBER | TEXT))? ";"
COLUMNS: NAME ("," NAME)* | "*"
NAME: /[a-z_]{1,4}/
TEXT: /'[^'\n]{0,3}'/
ESCAPED_STRING: /"([^"\\]|\\.){0,3}"/
NUMBER: /[0-9]{1,3}/
%ignore /[ \n\t]{1,2}/
""",
    "time": r"""
start: YEAR "-" MONTH "-" DAY ("T" HOUR ":" MINUTE)?
YEAR: /[0-9]{4}/
MONTH: /0[1-9]|1[0-2]/
DAY: /0[1-9]|[12][0-9]|3[01]/
HOUR: /[01][0-9]|2[0-3]/
MINUTE: /[0-5][0-9]/
""",
    "values": r"""
start: value
value: "{" (pair ("," pair)*)? "}" | "[" value ("," value)? "]" | STRING | "null"
pair: STRING ":" value
STRING: /"([^"\\\n\r]|\\["\\n]){0,3}"/
%ignore /[ \n]/
""",
}  # fmt: skip
TEXTS = {
    "arithmetic": ["1 + 2 * (3 + 4)", "12"],
    "patch": ["*** Begin Patch\n*** Add File: a\\b.c\n+\"x\"\n+\n-\\n\n*** End Patch\n",
              "*** Begin Patch\n@@\n é\n*** End Patch"],
    "sql": ["SELECT a,b FROM t WHERE c = \"\\\"\n\" ;", "SELECT * FROM t\n\tWHERE c ='\\';"],
    "time": ["2026-11-23T01:02"],
    "values": ['{"a\\n": ["", "\\\\"],\n"é": null}', "[{}\n,\n[[{}]]]"],
}  # fmt: skip


def _tool(definition):
    return Tool(name="run", kind="custom", syntax=Constraint(kind="lark", value=definition, field=FIELD))


def _use(tool, choice):
    return ToolUse(names=(tool.name,), custom=(tool.name,), types=argument_types([tool]), choice=choice)


def _judge(definition):
    return lark.Lark(definition, parser="earley", lexer="dynamic_complete")


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
def test_a_custom_tools_text_is_of_its_grammar(format):
    """The text parsed from any drawn call of a custom tool is accepted by its grammar, even one like 12."""
    words = vocabulary(True)
    for name, definition in GRAMMARS.items():
        tool, judge = _tool(definition), _judge(definition)
        grammar = call_grammar(format, (tool,), REQUIRED, parallel=False, special=words.special)
        for seed in range(2):
            ids, is_whole = words.draw(grammar, f"{name} {seed}", maximum=160)
            if is_whole:
                found = words.read(ids, format, _use(tool, REQUIRED))
                [(called, text, has_ended)] = found.calls
                assert (called, has_ended, found.text.strip()) == ("run", True, "")
                judge.parse(text)


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
def test_each_text_of_a_grammar_can_be_written(format):
    """Quotes, backslashes and line breaks in a grammar's text are escaped where needed, and parsed back."""
    words = vocabulary(True)
    for name, definition in GRAMMARS.items():
        tool = _tool(definition)
        grammar = call_grammar(format, (tool,), REQUIRED, parallel=False, special=words.special)
        for text in TEXTS[name]:
            call = str(written_calls(format, [ToolCall(id="", name="run", arguments={"input": text})]))
            if format.arguments == "keywords":
                call = call.replace(repr(text), json.dumps(text, ensure_ascii=False))
            assert words.accepts(grammar, call), call
            assert words.read(words.ids(call), format, _use(tool, REQUIRED)).calls == [["run", text, True]]


@pytest.mark.parametrize("name", ["hermes", "llama4_pythonic", "glm45"])
def test_a_grammar_beside_text_and_other_tools(name):
    """With tool choice auto a custom tool's grammar applies as soon as the tool is called."""
    words, format, tool = vocabulary(True), FORMATS[name], _tool('start: "a\\n" start "\\"" | "-"')
    auto = ToolChoice(mode="auto")
    grammar = call_grammar(format, (tool, Tool(name="now")), auto, special=words.special)

    def written(text):
        call = str(written_calls(format, [ToolCall(id="", name="run", arguments={"input": text})]))
        return call.replace(repr(text), json.dumps(text)) if format.arguments == "keywords" else call

    assert words.accepts(grammar, written('a\na\n-""'))
    assert words.accepts(grammar, "Nothing to do.")
    assert not words.accepts(grammar, written('a\n-""'))


def test_what_cannot_be_held_to_is_refused_by_its_field():
    """A grammar that cannot be quoted is refused with its field and line, and accepted in formats without quotes."""
    tool = _tool('start: "x"\n  %json {"type": "object"}'.replace("\n", " "))
    for format in FORMATS.values():
        if format.arguments == "parameters":
            assert call_grammar(format, (tool,), REQUIRED) is not None
            continue
        with pytest.raises(InvalidField, match=r"'%json' .*within quotes.*line 1") as caught:
            call_grammar(format, (tool,), REQUIRED)
        assert caught.value.param == FIELD


ENDED = [
    (r"start: /[^;]+/", ["a", "a\nb\n", "<p>x</p>", "a</"], ["a;"]),
    ('start: A (";" A)*\nA: /[^;]*/', ["a\nb;c<d", ";", "", "\n;<"], []),
    ('start: "x" /(?s:.*)/', ["x\ny\n", "x", "x<parameter", "x\n\n"], ["y"]),
    ("start: (S? LF)* S?\nS: /[a-z<]+/\n%import common.LF", ["a\n\nb<\n", "\n\n", "a"], ["A"]),
    ('start: x ","\nx[lazy]: /[^;]*,/\n%ignore /[ \\n]/', ["a,\n ,", "<,,"], ["a;,", "a,"]),
    (r'start: /[^\n,]+/ ","', ["a<p>,", "a</,"], ["b", "a\n,"]),
]  # fmt: skip


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(("definition", "right", "wrong"), ENDED)
def test_a_text_that_could_go_on_ends_where_it_stands_as_it_is(definition, right, wrong, name, special):
    """The last terminal of an unquoted text may accept the end marker too, but no terminal contains it."""
    words, format, tool = vocabulary(special), FORMATS[name], _tool(definition)
    grammar = call_grammar(format, (tool,), REQUIRED, parallel=False, special=words.special)
    for text in right + wrong:
        call = str(written_calls(format, [ToolCall(id="", name="run", arguments={"input": text})]))
        assert words.accepts(grammar, call) is (text in right), text
        assert words.read(words.ids(call), format, _use(tool, REQUIRED)).calls == [["run", text, True]]
    for mark in (format.value_end.strip(), format.value_end + format.call_end, format.parameter_begin):
        call = str(written_calls(format, [ToolCall(id="", name="run", arguments={"input": f"x{mark},"})]))
        assert not words.accepts(grammar, call)
