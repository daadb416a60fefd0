"""Grammars of callers, in Lark's notation and in GBNF."""

from __future__ import annotations

from typing import Any

import grammar_texts as texts
import pytest

from mlflow_llm.serving.interface.constraint import Constraint
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.structured.grammar import grammar_of

ARITHMETIC = r"""
// a comment with <|special|> and "quotes
%llguidance {}
start: expr
expr: term (("+" | "-") term)*   # another one: @name
term: NUMBER | "(" expr ")" | /x\/y</
NUMBER: /[0-9]{1,3}/
%ignore / /
"""
GBNF = r"""
# a comment
root ::= "yes" ws thing+ | [a-c]{2}
thing ::= ("!" | "?") ws
ws ::= [ ]?
"""


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (ARITHMETIC, ["1+2", "(1 + 2)-3", "x/y<"], ["", "1+", "1234"]),
        (GBNF, ["yes!", "yes ! ?", "ab"], ["no", "abc"]),
        ('start: "<|im_end|>"', ["<|im_end|>"], ["<|im_end|"]),
        ('start: a\na[lazy]: /a+/\n%import common.INT', ["a"], ["b"]),
        ('start: "v" %json {"type": "object", "properties": {"<x>": {"type": "integer"}}}', ['v{"<x>": 1}'], ["v{}1"]),
    ],
)  # fmt: skip
def test_a_grammar_is_held_to(grammar: str, right: list[str], wrong: list[str]) -> None:
    """Comments, strings and expressions of a grammar may contain what is refused elsewhere."""
    made = texts.of("lark", grammar)
    assert [text for text in right if not texts.takes(made, text)] == []
    assert [text for text in wrong if texts.takes(made, text)] == []


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ("start: <|im_end|>", r"no special tokens \(line 1\)"),
        ('start: "a"\n\nb: <[5]>', r"no special tokens \(line 3\)"),
        ("start: <[*]>", "no special tokens"),
        ("start: @other", "no other one"),
        ("start: a\na[temperature=2]: /.*/", "'temperature' .*without options of sampling"),
        ("start: a\na[max_tokens=2]: /.*/", "'max_tokens'"),
        ('start: a\na[stop="x"]: /.*/', "'stop'"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "no options but"),
        ('%declare X\nstart: "a"', "one of %ignore"),
        ('start: %json {"type": "object"', "JSON behind it"),
        ('start: %json {"type": "object", "x-guidance": {"lenient": true}}', "x-guidance"),
        ('start: %json {"not": {}}', "'not'"),
        ("root ::= (", "a grammar in GBNF"),
        ("root ::= missing", "a grammar in GBNF"),
        ("root ::= " + "(" * 5000, "a grammar in GBNF"),
        ("\n".join(f"r{i} ::= r{i + 1}" for i in range(400)), "at most 256 rules"),
        ("x" * 70_000, "at most 65,536"),
        ("", "a grammar in Lark's notation or GBNF"),
        (7, "a grammar in Lark's notation or GBNF"),
        ("start: \ud800", "a grammar in Lark's notation or GBNF"),
    ],
)
def test_what_reaches_past_the_text_is_refused_by_name(grammar: Any, named: str) -> None:
    """Special tokens, sampling and engine options, other grammars and rule-disabling schemas are refused by name."""
    with pytest.raises(InvalidField, match=f"^guided_grammar.*(?s:.*){named}"):
        grammar_of(Constraint(kind="lark", value=grammar, field="guided_grammar"))


def test_json_schema_within_a_grammar_keeps_its_keys_apart() -> None:
    """The open keys of a JSON schema within a grammar stay distinct too."""
    open_keys = 'start: %json {"type": "object"}'
    assert grammar_of(Constraint(kind="lark", value=open_keys, field="f")).distinct_keys
    assert not grammar_of(Constraint(kind="lark", value='start: "a"', field="f")).distinct_keys
