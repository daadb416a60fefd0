"""Constraints made into grammars."""

from __future__ import annotations

import json
from typing import Any

import grammar_texts as texts
import pytest

from mlflow_llm.serving.interface.constraint import Constraint
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.structured.grammar import grammar_of, schema_value


def test_json_object_is_any_object() -> None:
    """``json_object`` takes objects with whatever is in them, and nothing else."""
    made = texts.of("json_object")
    assert texts.takes(made, '{"a": [1, {"b": null}], "c": "é"}')
    assert texts.takes(made, "{}")
    assert not any(texts.takes(made, text) for text in ("[]", "1", "{} ", '{"a": }', '{"a": 1,}'))


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('{"a": 1, "b": [1, 2]}', True),
        ('{"a":1,"b":[1,2]}', True),
        ('{"a":  1}', False),
        ('{ "a": 1}', False),
        ('{"a": 1 }', False),
        ('{"a": 1\n}', False),
    ],
)
def test_whitespace_is_one_blank_at_most(text: str, taken: bool) -> None:
    """At most one blank is allowed behind a comma or a colon, and white space nowhere else."""
    assert texts.takes(texts.of("json_object"), text) is taken


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_compact_json_has_no_blank(kind: str) -> None:
    """``compact`` allows no blank behind a comma or a colon, but keeps those in strings."""
    value = {"type": "object", "additionalProperties": True} if kind == "json_schema" else None
    made = texts.matcher(grammar_of(Constraint(kind=kind, value=value, compact=True, field="f")))
    assert texts.takes(made, '{"a":1,"b":[1,"c d"]}')
    assert not any(texts.takes(made, text) for text in ('{"a": 1}', '{"a":[1, 2]}', '{"a":1, "b":2}'))


def test_digits_and_nesting_have_an_end() -> None:
    """Runs of digits and nesting are bounded."""
    made = texts.of("json_object")
    assert texts.takes(made, '{"a": 123456789012345.0123456789}')
    assert not texts.takes(made, '{"a": ' + "1" * 20 + "}")
    assert not texts.takes(made, '{"a": 0.' + "1" * 11 + "}")
    assert not texts.takes(made, '{"a": 1e5}')
    assert texts.takes(made, '{"a": ' + "[" * 8 + "]" * 8 + "}")
    assert not texts.takes(made, '{"a": ' + "[" * 10 + "]" * 10 + "}")


def test_a_choice_is_one_of_its_texts() -> None:
    """Choices are taken as they are, whatever characters they have."""
    choices = ['yes "or" no', "a/b", "né\n😀", "tab\t\x7f\x85", "\\d+", "yes"]
    made = texts.of("choice", tuple(choices))
    assert all(texts.takes(made, choice) for choice in choices)
    assert not any(texts.takes(made, text) for text in ("", "ye", "yesyes", "d+", "1"))


@pytest.mark.parametrize("value", [[], ["a", "a"], ["a", ""], ["a", 1], "abc", None, ["\ud800"]])
def test_choices_are_different_texts(value: Any) -> None:
    """A choice of nothing, the same twice, an empty text or no text is refused."""
    with pytest.raises(InvalidField, match="guided_choice"):
        grammar_of(Constraint(kind="choice", value=value, field="guided_choice"))


def test_a_schema_stands_in_a_larger_grammar() -> None:
    """A schema from ``schema_value`` is enforced inside ``%json`` of a larger grammar by the same rules."""
    schema = schema_value({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}, "tools")
    grammar = grammar_of(Constraint(kind="lark", value='start: "<" /[a-z]+/ ">" "x"', field="f"))
    source = json.dumps({"grammars": [{"lark_grammar": f'start: "<call>" %json {json.dumps(schema)} "</call>"'}]})
    made = texts.matcher(type(grammar)(source=source, field="tools"))
    assert texts.takes(made, '<call>{"n": 1}</call>')
    assert not texts.takes(made, '<call>{"n":  1}</call>')
    assert not texts.takes(made, '<call>{"n": 1, "m": 2}</call>')
