"""Grammars in Lark's notation between the quotes of JSON."""

from __future__ import annotations

import json
import random

import grammar_texts as texts
import pytest

from mlflow_llm.serving.interface.constraint import Constraint
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.structured.grammar import quoted_grammar
from mlflow_llm.serving.structured.lark_reading import _COMMON

# grammars, and the letters that their texts are tried with
GRAMMARS = {
    "a line and its break": (r'start: /[^\n]+/ "\n"', 'ab\n"\\\t'),
    "lines": ('start: line+\nline: "+" /(.*)/ LF -> line\n%import common.LF', '+a\n"\\'),
    "no line break between": (r'start: x | y x' "\n" r'x: /a(\t)?/' "\n" r'y: "\n"~1..2', "a\t\n"),
    "a tab that may follow": (r'start: (A | B)* "\""' "\n" r'A: /a(\t)?/' "\n" r'B: "\n"i', 'a\t\n"'),
    "lazy": ('start: x "b"\nx[lazy]: /.*\\n/', "ab\n"),
    "suffix": ('start: (x "b")+\nx[suffix="\\n", capture="y"]: /[^"]*/', 'ab\n"'),
    "a choice of terminals": ('start: A "\\t"? | B\nA: ("a" | /\\n/i)+\nB: "a".."c" "\\\\"', "a\n\tbc\\"),
    "nullable terminals": ('start: A B\nA: /\\n*/\nB: /[\\n\\t]*"/', '\n\t"'),
    "nullable rules": ('start: a* [b] ["\\t" | "x"]\na: | "\\n"\n?b: "\\\\"? "\\""', '\n\\"\tx'),
    "left, right, middle": ('start: l r m\nl: l "\\n" | \nr: "\\"" r | "a"\n!m: "(" m ")" | /[\\\\]/', '\n"a()\\'),
    "repetitions": ('start: "\\n"~2..3 /\\s/{1,2} "x"{,2} ("\\"" | "y"){3,} "z"~5', '\n\tx"yz'),
    "control characters": ('start: a\na: "\\\\" a "\\"" | /[\\x00-\\x1f]/', '\\"\x00\x1f\n\x7f'),
    "classes": (r"start: /[[:cntrl:]--\n]/ /\p{Po}+/ /[^\S ]*/ /[\w--[a-c]]?/", '\n\t"\\ !ad'),
    "flags": (r'start: /(?i:k["\\])(?s).\W/i /(?-i:É)|(?i)é/ "ß"i?', 'Kk\u212a"\\\n ÉéßẞS'),
    "anchors": (r'start: /^a"$/ /(?i)\Ab\\\z/? /^(?:"|a\$)$/?', 'aB"\\$'),
    "dots": (r"start: /./ /./s /(?s:.)(?-s:.)/s", 'a\n"'),
    "escapes": (r'start: "\x22\u000a" /\x22|\x{5C}|\u{A}|\//', '"\n\\/'),
    "C's comments": ("start: C_COMMENT /[a\\n]*/\n%import common.C_COMMENT", "/*a\n"),
    "unicode": ('start: /[é-ü\\n]+/ "\U0001f600" /\\P{Cc}/', "éü\n\U0001f600\\"),
    "no first blank twice": ('start: "a" "b"\n%llguidance {"ignore_once": true}\n%ignore "\\n"', "ab\n"),
    "a first blank": ('start: "a" "b"\n%llguidance {"allow_initial_skip": true}\n%ignore "\\n"', "ab\n"),
    "a dot ignored": ('start: "a"? "\\\\"\n%ignore /[ \\n]/\n%ignore /"+/', 'a\\\n "'),
    "terminals of terminals": ('start: B\nB: A A | "\\n" A\nA: C{2}\nC: /["x]/', '\n"x'),
    "imports": ("start: S (NUMBER S)*\n%import common (NUMBER, LETTER)\n%import common.ESCAPED_STRING -> S", '"\\1.e'),
}  # fmt: skip


def _quoted(lark: str) -> texts.llguidance.LLMatcher:
    return texts.matcher(quoted_grammar(Constraint(kind="lark", value=lark, field="f")))


def _inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_texts_are_those_of_the_grammar_escaped(name: str) -> None:
    """An escaped text is taken if and only if the plain grammar takes the text."""
    lark, letters = GRAMMARS[name]
    plain, quoted, rng = texts.of("lark", lark), _quoted(lark), random.Random(name)
    taken = 0
    for _ in range(250):
        text = "".join(rng.choices(letters, k=rng.randint(0, 8)))
        is_taken = texts.takes(plain, text)
        taken += is_taken
        assert texts.takes(quoted, _inside(text)) == is_taken, text
    assert taken or name in ("left, right, middle", "repetitions", "unicode", "flags", "a line and its break")


ATOMS = [
    r'"\n"', r'"\""', '"a"', r'"a\n"', r'"\t"i', r"/[^\n]/", r"/[a\n]+/", r"/a*/", r"/\s*\"?/", r"/(a\t)?/", r"/.b?/",
    r'"\t".."\n"', r"/[^ab]{1,2}/", "T", "U", "U", "T", r"/\\[\\\n]?/", r'"b\""', r"/(?s:.)b/", "l",
]  # fmt: skip

LAZY = [r'"a\n"', r"/[^\n]/", r"/[a\n]+/", r"/.b?/", r"/[^ab]{1,2}/", r'"\""']


def _random_rule(rng: random.Random, atoms: list[str], depth: int = 0) -> str:
    options = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        items = []
        for _ in range(rng.choice([1, 2, 2, 3]) if depth else rng.randint(1, 3)):
            nested = depth < 2 and rng.random() < 0.25
            item = f"({_random_rule(rng, atoms, depth + 1)})" if nested else rng.choice(atoms)
            items.append(item + rng.choice(["", "", "", "?", "*", "+", "~2", "{1,3}"]))
        options.append(" ".join(items))
    return " | ".join(options)


@pytest.mark.parametrize("seed", range(6))
def test_random_grammars_take_the_same_texts(seed: int) -> None:
    """Random quoted grammars accept the texts of the plain ones, where those compile."""
    rng, taken = random.Random(seed), 0
    for _ in range(12):
        terminals = [atom for atom in ATOMS if atom not in ("T", "U", "l")]
        lark = "\n".join([
            f"start: {_random_rule(rng, [*ATOMS, 'x', 'y'])}",
            f"x: {_random_rule(rng, [*ATOMS, 'y'])}",
            f"y: {_random_rule(rng, ATOMS)}",
            f"l[lazy]: {' '.join(rng.choices(LAZY, k=2))}",
            f"T: {_random_rule(rng, [*terminals, 'U'])}",
            f"U: {_random_rule(rng, terminals)}",
        ])  # fmt: skip
        plain, quoted = texts.of("lark", lark), _quoted(lark)
        for _ in range(60):
            text = "".join(rng.choices('ab\n\n"\t\\', k=rng.randint(0, 7)))
            is_taken = texts.takes(plain, text)
            taken += is_taken
            assert texts.takes(quoted, _inside(text)) == is_taken, (lark, text)
    assert taken


def test_what_is_ignored_stands_between_terminals() -> None:
    """Ignored terminals are accepted where the plain grammar accepts them, even at the end, but not between quotes."""
    lark = 'start: ESCAPED_STRING ("," ESCAPED_STRING)*\n%import common (ESCAPED_STRING, WS)\n%ignore WS'
    quoted, plain = _quoted(lark), texts.of("lark", lark)
    for text in ('"a" ,\n"\t\\n"', '""', '"a"x', '"a",', '"\\"', '"é\n\n"\n,""'):
        assert texts.takes(quoted, _inside(text)) == texts.takes(plain, text)
    assert texts.takes(plain, '"a"\n')
    assert not texts.takes(quoted, _inside('"a"\n'))


@pytest.mark.parametrize("name", _COMMON)
def test_quoted_common_terminals_match_the_plain_ones(name: str) -> None:
    """A quoted common terminal accepts the same texts as llguidance's own."""
    lark, rng = f'start: "\\n" X\n%import common.{name} -> X', random.Random(name)
    plain, quoted = texts.of("lark", lark), _quoted(lark)
    for _ in range(60):
        text = "\n" + "".join(rng.choices('1.e-+aZ_"\\ \t\f\r\n#/*', k=rng.randint(1, 5)))
        assert texts.takes(quoted, _inside(text)) == texts.takes(plain, text), text


def test_each_text_has_one_spelling() -> None:
    """Unneeded or overlong escapes are not accepted, nor are characters that need one."""
    quoted = _quoted(r"start: /[\s\S]/")
    for spelling in ("a", r"\n", r"\"", r"\\", r"\u001f", r"\b", "é", "/"):
        assert texts.takes(quoted, spelling)
    for spelling in (r"\u0061", r"\u000a", r"\u001F", r"\/", r"\u00e9", "\n", '"', "\\", "\x1f"):
        assert not texts.takes(quoted, spelling)


@pytest.mark.parametrize(
    "lark", ['start: %regex {"substring_words": "a b"}', 'start: A\nA: /[a-z]*/ & /[ab]*/ | "c"', "root ::= [a-c]+"]
)
def test_what_needs_no_escapes_stays_as_it_is(lark: str) -> None:
    """A grammar whose texts never need escapes may use constructs that cannot be quoted."""
    assert texts.takes(_quoted(lark), "a")


@pytest.mark.parametrize(("lark", "named"), [
    ('start: "\\n" %json {"type": "object"}', r"'%json' .*\(line 1\)"),
    ('start: A\nA: ~/a/', r"'~' .*\(line 2\)"),
    ('start: A\n\nA: /[a"]/ & /[b"]/', r"'&' .*\(line 3\)"),
    ('start: %regex {"substring_chars": "a\\nb"}', r"'%regex' .*\(line 1\)"),
    (r'start: /a\b"/', r"no escape \\b \(line 1\)"),
    (r'start: /(?=a)"/', "look-around"),
    (r'start: /a^"/', r"with \^ at their ends alone"),
    (r'start: /^a|"$/', r"at the ends of all alternatives together"),
    (r'start: /^"(?m).$/', r"without the flag m"),
    (r'start: /(?x) "/', "no flags but"),
    (r'start: /(?-u:")/', "no flags but"),
    (r'start: /"\p{Emoji}/', "no property"),
    (r'start: /[[:foo:]"]/', r"no class \[:foo:\]"),
    (r'start: /["a-\d]/', "ranges in a class"),
    ('start: /a{2', "quantifiers|'/a"),
    ('start: /("/', "does not end in the middle"),
    ('start: /(a"))/', "opening parenthesis"),
    ('start: a\na[stop_capture="x"]: "\\""', "stop_capture"),
    ('start: "\\"" a', r"the rule 'a', which is not there.*\(line 1\)"),
    ('start: "\\"" A', r"'A' .*\(line 1\)"),
    ('start: A "\\""\nA: B\nB: A', r"'A' .*\(line 3\)"),
    ('start: a{"\\""}\na{x}: x', r"'\{' .*\(line 2\)|parameters"),
    ('start.2: "\\""', r"'\.' .*\(line 1\)"),
    ('start: "\\""\nstart: "a"', "start. twice"),
    ('a: "\\""', "without the rule 'start'"),
    ('start: "\\"" start', "no text at all"),
    ('start: "\\n"{1,999999}', "999999 repetitions"),
    ('start: "\\n"{3,1}', "from more to fewer"),
    ('start: "\\n"~' + "9" * 5000, r"'9{9}' .*line 1|repetitions"),
    (r'start: /"\x{110000}/', "escapes of characters"),
    ('start: "\\q"', r"\(line 1\)"),
    ('start: "b".."\\""', "range"),
    ('start: ' + "(" * 40 + '"\\""' + ")" * 40, "nested that deep"),
    ("start: /" + "(" * 60 + '"' + ")" * 60 + "/", "at most 50 groups"),
    ("start: A29\n" + "\n".join(f"A{i + 1}: A{i} A{i}" for i in range(29)) + '\nA0: "\\""', r"'A29'|too many forms"),
    ("start: T\n" + "\n".join(f"{'T' * (i + 1)}: {'T' * (i + 2)} {'T' * (i + 2)}" for i in range(25))
     + f'\n{"T" * 26}: "\\""', "too many forms"),
    ("start: " + " ".join(f'"{i}"? "\\"{i}"?' for i in range(2500)), "too many forms"),
    ("start: %if", "one of %ignore"),
    ('start: "\\""\n%import common.NOTHING', "common.NOTHING"),
], ids=lambda value: value[:24])  # fmt: skip
def test_constructs_that_cannot_be_quoted_are_refused(lark: str, named: str) -> None:
    """A construct that cannot be quoted is refused with its line and name."""
    with pytest.raises(InvalidField, match=f"^f(?s:.*)(?:{named})"):
        _quoted(lark)


def test_a_grammar_of_many_rules_is_written_at_once() -> None:
    """A grammar of many mutual rules, long choices and repetitions is quoted within bounds."""
    rules = "\n".join(f'r{chr(97 + i)}: "\\n" r{chr(97 + (i + 1) % 20)} | /"[^"]*"/' for i in range(20))
    words = " | ".join(f'"w{i}\\n"' for i in range(300))
    lark = f"start: ra | ({words}){{1,1000}} | {'(' * 20}{words}{')' * 20}\n{rules}"
    quoted = _quoted(lark)
    assert texts.takes(quoted, r"\n\n\"\"")
    assert texts.takes(quoted, r"w1\nw299\n" * 300)
    assert not texts.takes(quoted, r"w1\nw299" * 30)
