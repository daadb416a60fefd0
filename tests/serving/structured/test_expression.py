"""Regular expressions of callers."""

from __future__ import annotations

import json
import re
from typing import Any

import grammar_texts as texts
import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflow_llm.serving.interface.constraint import Constraint
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.structured.grammar import grammar_of

ATOMS = [
    "a",
    "b",
    "1",
    ".",
    r"\d",
    r"\w",
    r"\s",
    r"\D",
    r"\S",
    "[ab]",
    "[^ab]",
    r"[a\d-]",
    r"[\]^-]",
    r"\-",
    "(?:ab|b)",
    "(a)",
]


@st.composite
def unanchored(draw: st.DrawFn, depth: int = 2) -> str:
    """Draw expressions of the syntax common to Python, JavaScript and Rust."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        atom = draw(st.sampled_from(ATOMS))
        if depth and draw(st.booleans()):
            atom = f"({draw(st.sampled_from(['', '?:']))}{draw(unanchored(depth - 1))})"
        parts.append(atom + draw(st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "*?", "+?"])))
    return "".join(parts) + draw(st.sampled_from(["", "", "|a", "|"]))


@st.composite
def anchored(draw: st.DrawFn) -> str:
    ends = (draw(st.sampled_from(["", "^"])), draw(st.sampled_from(["", "$"])))
    return f"{ends[0]}({draw(unanchored())}){ends[1]}{draw(st.sampled_from(['', '|^b', '|1$', '|^$', '|(a|^)b']))}"


def python(expression: str) -> re.Pattern[str]:
    """Translate for Python, whose dollar also matches before a final line break."""
    return re.compile(expression.replace("$", r"\Z"), re.ASCII)


WORDS = st.lists(st.text("ab1 -]\n", max_size=6), min_size=5, max_size=20)


@given(expression=anchored(), words=WORDS)
@settings(max_examples=150, deadline=None)
def test_a_pattern_matches_what_python_finds(expression: str, words: list[str]) -> None:
    """A schema's pattern is found anywhere in a text, as ``re.search`` finds it."""
    made = texts.of("json_schema", {"type": "string", "pattern": expression})
    for word in words:
        assert texts.takes(made, json.dumps(word)) == bool(python(expression).search(word)), (expression, word)


@given(expression=unanchored(), words=WORDS)
@settings(max_examples=100, deadline=None)
def test_an_expression_matches_the_text_as_a_whole(expression: str, words: list[str]) -> None:
    """``guided_regex`` is a full match, with anchors or without."""
    for made in (texts.of("regex", expression), texts.of("regex", f"^({expression})$")):
        for word in words:
            assert texts.takes(made, word) == bool(python(expression).fullmatch(word)), (expression, word)


@pytest.mark.parametrize(
    ("expression", "right", "wrong"),
    [
        (r"^\d{3}-\d{4}$", ["555-1234"], ["555-12345", "x555-1234", ""]),
        (r"^\d{00000000003}$", ["555"], ["5", "5{00000000003}"]),
        (r"^a{0000000001,02}b{00,}$", ["a", "aab", "abbb"], ["b", "aaa"]),
        ("a/b\n\"c\"", ['a/b\n"c"'], ["a/b"]),
        (r"(?i)yes|no", ["YES", "No"], ["maybe"]),
        (r"(?s:.)", ["\n"], ["ab"]),
        (".", ["a"], ["\n", "\u2028"]),
        (r"\u00e9\x41\u{1F600}\ud83d\ude00", ["éA😀😀"], ["e"]),
        (r"[\s\S]", ["a", "\n"], [""]),
        (r"\p{Lu}+", ["ÉA"], ["é"]),
        (r"a{2,}b{0,2}c{1}", ["aac", "aaabbc"], ["ac"]),
        (r"a{x", ["a{x"], ["a"]),
        (r"[a&&b~~-]", ["&", "~", "-", "a"], ["c"]),
        (r"(?P<year>\d+)-(?<month>\d+)", ["1-2"], ["1"]),
        (r"\Aab\Z", ["ab"], ["abc"]),
        ("", [""], ["a"]),
        (r"\cJ\0?", ["\n"], ["J"]),
        ("(^a|b)c", ["ac", "bc"], ["c"]),
    ],
)  # fmt: skip
def test_dialects_meet(expression: str, right: list[str], wrong: list[str]) -> None:
    """Constructs that JavaScript, Python and Rust write differently are all understood."""
    made = texts.of("regex", expression)
    assert [text for text in right if not texts.takes(made, text)] == []
    assert [text for text in wrong if texts.takes(made, text)] == []


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("(?=a)b", r"look-ahead \(\?="),
        ("(?!a)b", r"look-ahead \(\?!"),
        ("(?<=a)b", r"look-behind \(\?<="),
        ("(?<!a)b", r"look-behind \(\?<!"),
        (r"(a)\1", r"backreferences \(\\1\)"),
        (r"(?<x>a)\k<x>", "backreferences"),
        ("(?P<x>a)(?P=x)", r"backreference \(\?P="),
        (r"\bword\b", r"word boundaries \(\\b\)"),
        ("(?>a)", "atomic"),
        ("a++", "possessive"),
        ("(?(1)a|b)", "conditional"),
        ("(?m)^a$", "no flags but"),
        ("a^b", r"\^ and \$ at the ends"),
        ("(^a)*", r"\^ and \$ at the ends"),
        ("a{2,1}", "from fewer to more"),
        ("a{1,100000}", "at most 10,000"),
        ("a{9999999999}", "at most 10,000"),
        ("a{1,99999999999}", "at most 10,000"),
        ("a{" + "9" * 5000 + ",}", "at most 10,000"),
        ("*a", "something to repeat"),
        ("a**", "something to repeat"),
        ("a{,3}", r"\{0,n\}"),
        ("(a", "does not end"),
        ("a)", "opening parenthesis"),
        ("[a", "does not end"),
        ("[]a]", "not empty"),
        ("[z-a]", "from a lower"),
        ("[[:alpha:]]", "POSIX"),
        (r"\Q", "no escape"),
        ("a\\", "does not end"),
        (r"\ud83d", "surrogate"),
        ("(" * 60 + ")" * 60, "at most 50 groups"),
        ("a" * 20_000, "at most 16,384"),
        (5, "a regular expression"),
        ("\ud800", "a regular expression"),
    ],
)
def test_unsupported_constructs_are_refused_by_name(expression: Any, named: str) -> None:
    """An unsupported construct is refused by name, for a field and for a schema's pattern with its pointer."""
    with pytest.raises(InvalidField, match=f"^guided_regex: .* is not allowed; expected .*{named}"):
        grammar_of(Constraint(kind="regex", value=expression, field="guided_regex"))
    schema = {"type": "object", "properties": {"a/b": {"pattern": expression}}}
    with pytest.raises(InvalidField, match=r"^f(#/properties/a~1b/pattern)?: "):
        grammar_of(Constraint(kind="json_schema", value=schema, field="f"))


@given(st.text("ab()[]{}|*+?^$.\\-:<>=!P&/1,dswpux0\n", max_size=30))
@settings(max_examples=500, deadline=None)
def test_any_text_is_refused_or_compiles(expression: str) -> None:
    """Any expression compiles or is refused with an ``InvalidField``."""
    try:
        grammar = grammar_of(Constraint(kind="regex", value=expression, field="guided_regex"))
    except InvalidField:
        return
    reason = llguidance.LLMatcher.validate_grammar(grammar.source, texts.TOKENIZER)
    assert not reason or r"\p" in expression.lower(), (expression, reason)
