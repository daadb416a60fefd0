"""Parses llguidance's variant of Lark's notation into trees of rules and terminals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

from . import rust_expression
from .regular import SPECIAL, Chars, Choice, Node, Repeated, Rule, Sequence, Terminal, Unwritable, escaped, literal

MAX_GROUPS_DEEP = 28  # llguidance's bound

_TOKENS = re.compile(
    r"""(?P<blank>[ \t]+|(?://|\#)[^\n]*)|(?P<line>(?:\r?\n)+[ \t]*)|(?P<text>"(?:[^"\\\n]|\\.)*"i?)"""
    r"""|(?P<expression>/(?:[^/\\]|\\.)+/[imslux]*)|(?P<command>%[a-z]+)|(?P<rule>!?[_?]?[a-z][_a-z0-9-]*)"""
    r"""|(?P<terminal>_?[A-Z][_A-Z0-9-]*)|(?P<number>[+-]?[0-9]{1,9})|(?P<sign>->|\.\.|::|[+*?:,.(){}\[\]~|&=_])""",
    re.DOTALL,
)
_ANY = frozenset(SPECIAL)
# the terminals of `%import common` (llguidance's parser/src/lark/common.rs)
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"(\+|-)?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*)|(\.[0-9]+)",
    "_EXP": r"[eE](\+|-)?[0-9]+",
    "FLOAT": r"([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+",
    "SIGNED_FLOAT": r"(\+|-)?(([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+)",
    "NUMBER": r"([0-9]+)|([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+",
    "SIGNED_NUMBER": r"(\+|-)?(([0-9]+)|([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+)",
    "ESCAPED_STRING": r"\"([^\"\\]|\\.)*\"",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+(?:[^/*][^*]*\*+)*\/",
    "SQL_COMMENT": r"--[^\n]*",
}


@dataclass(slots=True)
class LarkGrammar:
    """A parsed grammar: rules and terminals by name.

    ``ignored`` may stand between terminals, ``options`` are those of ``%llguidance``, ``unwritable`` are the parts that
    cannot be written between quotes, and ``special`` are the ``SPECIAL`` characters that texts may contain.
    """

    rules: dict[str, Node] = field(default_factory=dict)
    terminals: dict[str, Node] = field(default_factory=dict)
    ignored: list[Node] = field(default_factory=list)
    options: dict[str, object] = field(default_factory=dict)
    unwritable: list[Unwritable] = field(default_factory=list)
    special: set[str] = field(default_factory=set)


def read(text: str, refuse: Callable[..., NoReturn]) -> LarkGrammar:
    """Return the parsed grammar. ``refuse(what, line, allowed)`` raises; it is called for unsupported notation."""
    return _Reader(text, refuse).read()


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int
    value: object = None


_RuleBody: TypeAlias = tuple[str, bool, "int | None", int]  # name, lazy, and the tokens where suffix and body begin


class _Reader:
    def __init__(self, text: str, refuse: Callable[..., NoReturn]) -> None:
        self.refuse_at = refuse
        self.tokens = self._tokens(text)
        self.at = 0
        self.grammar = LarkGrammar()
        self.definitions: dict[str, tuple[int, int]] = {}  # of terminals: the token where the body begins, and its line
        self.open: set[str] = set()

    def _tokens(self, text: str) -> list[_Token]:
        found, at, line = [], 0, 1
        while at < len(text):
            token = _TOKENS.match(text, at)
            if token is None:
                self.refuse_at(text[at : at + 20], line)
            begin, at = line, token.end()
            kind, value = str(token.lastgroup), None
            if token[0] in ("%json", "%regex", "%llguidance"):
                start = re.compile(r"\s*").match(text, at)
                assert start is not None
                value, at = json.JSONDecoder().raw_decode(text, start.end())  # known to be valid: it has been checked
            line += text.count("\n", token.start(), at)
            if kind != "blank":
                found.append(_Token(kind, token[0], begin, value))
        return [*found, _Token("line", "\n", line), _Token("end", "the end", line)]

    def refuse(self, what: str = "") -> NoReturn:
        token = self.tokens[self.at]
        self.refuse_at(what or token.text.strip() or "the end of a line", token.line)

    # -- tokens

    @property
    def next(self) -> _Token:
        return self.tokens[self.at]

    def take(self, kind: str, text: str = "") -> str:
        token = self.next
        if token.kind != kind or (text and token.text != text):
            self.refuse()
        self.at += 1
        return token.text

    def has(self, *signs: str) -> bool:
        """Consume one of ``signs`` if it is next, and return whether it was."""
        if self.next.kind == "sign" and self.next.text in signs:
            self.at += 1
            return True
        return False

    # -- items

    def read(self) -> LarkGrammar:
        """Parse the grammar. Bodies are parsed once all names are known, since these may be used before definition."""
        bodies: list[_RuleBody] = []
        ignored: list[int] = []
        while self.next.kind != "end":
            token = self.next
            if token.kind == "line":
                self.at += 1
            elif token.kind in ("rule", "terminal"):
                self.at += 1
                self._item(token, bodies)
            elif token.text == "%ignore":
                self.at += 1
                ignored.append(self.at)
                self._skip_body()
            elif token.text == "%import":
                self.at += 1
                self._import()
            elif token.text == "%llguidance" and isinstance(token.value, dict):
                self.grammar.options |= token.value
                self.at += 1
            else:
                self.refuse()
        for name in self.definitions:
            self._terminal(name)
        for name, lazy, suffix, at in bodies:
            self.at = at
            self.grammar.rules[name] = self._lazy(suffix) if lazy else self._body(name)
        for at in ignored:
            self.at = at
            self.grammar.ignored.append(self._body(None))
        return self.grammar

    def _lazy(self, suffix: int | None) -> Terminal:
        """Return a rule that ends as soon as it can, with its suffix if it has one."""
        body = self._body(None)
        if suffix is None:
            return Terminal(body, True)
        self.at = suffix
        return Terminal(Sequence((body, self._value(self.next))), True)

    def _item(self, token: _Token, bodies: list[_RuleBody]) -> None:
        name, lazy, suffix = token.text, False, None
        if token.kind == "rule":
            name = name.removeprefix("!").removeprefix("?")
            if self.next.text == "[":
                lazy, suffix = self._options(name)
        self.take("sign", ":")
        if name in self.definitions or name in self.grammar.terminals or any(name == each[0] for each in bodies):
            self.refuse(f"{name!r} twice")
        if token.kind == "rule":
            bodies.append((name, lazy, suffix, self.at))
        else:
            self.definitions[name] = (self.at, token.line)
        self._skip_body()

    def _options(self, name: str) -> tuple[bool, int | None]:
        """Return whether a rule is lazy, and the token of its suffix. Capture names are ignored."""
        self.take("sign", "[")
        lazy, suffix = False, None
        while not self.has("]"):
            option = self.take("rule")
            if option == "capture":
                if self.has("="):
                    self.take("text")
            elif option == "lazy":
                lazy = True
            elif option == "suffix" and suffix is None:
                self.take("sign", "=")
                lazy, suffix = True, self.at
                if self.next.text == '""' or self.next.kind not in ("text", "expression", "terminal"):
                    self.refuse(f"this suffix of {name!r}")
                self.at += 1
            else:
                self.refuse(f"the option {option!r} of {name!r}")
            self.has(",")
        return lazy, suffix

    def _skip_body(self) -> None:
        """Skip a body, which continues in a following line that begins with "|"."""
        while self.next.kind != "line" or self.tokens[self.at + 1].text == "|":
            if self.next.text == "%if" or self.next.kind == "end":
                self.refuse()
            self.at += 1

    def _import(self) -> None:
        line = self.next.line
        self.take("rule", "common")
        if self.has("."):
            name = self.take("terminal")
            wanted = [(name, self.take("terminal") if self.has("->") else name)]
        else:
            self.take("sign", "(")
            wanted = [(name := self.take("terminal"), name)]
            while self.has(","):
                wanted.append((name := self.take("terminal"), name))
            self.take("sign", ")")
        for name, alias in wanted:
            if name not in _COMMON or alias in self.grammar.terminals or alias in self.definitions:
                self.refuse_at(f"common.{name}", line)
            self.grammar.terminals[alias] = self._expression(_COMMON[name], "", line)

    def _terminal(self, name: str) -> Node:
        if name not in self.grammar.terminals:
            if name not in self.definitions or name in self.open:
                self.refuse()
            self.open.add(name)
            before, (self.at, _) = self.at, self.definitions[name]
            self.grammar.terminals[name] = self._body(None)
            self.at = before
            self.open.discard(name)
        return self.grammar.terminals[name]

    # -- bodies: of a rule if ``rule`` is its name, or of a terminal if it is None

    def _body(self, rule: str | None) -> Node:
        return self._choice(rule, 0)

    def _choice(self, rule: str | None, depth: int) -> Node:
        if depth > MAX_GROUPS_DEEP:
            self.refuse("groups nested that deep")
        options = [self._sequence(rule, depth)]
        while self._bar():
            options.append(self._sequence(rule, depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _bar(self) -> bool:
        if self.next.kind == "line" and self.tokens[self.at + 1].text == "|":
            self.at += 1
        return self.has("|")

    def _sequence(self, rule: str | None, depth: int) -> Node:
        items: list[Node] = []
        while self.next.kind not in ("line", "end") and self.next.text not in ("|", "->", ")", "]", "}"):
            if self.next.text == "&":
                self._note("&", frozenset())
                self.at += 1
            items.append(self._repeated(rule, depth))
        if self.has("->"):
            self.take("rule")
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _note(self, what: str, special: frozenset[str]) -> Unwritable:
        made = Unwritable(what, self.next.line, special)
        self.grammar.unwritable.append(made)
        self.grammar.special |= special
        return made

    def _repeated(self, rule: str | None, depth: int) -> Node:
        node = self._atom(rule, depth)
        if self.next.text == "~" and self.tokens[self.at + 1].kind == "number":
            self.at += 1
            minimum = self._count()
            maximum = self._count() if self.has("..") else minimum
        elif self.has("{"):
            minimum = 0 if self.next.text == "," else self._count()
            comma = self.has(",")
            maximum = minimum if not comma else None if self.next.text == "}" else self._count()  # type: ignore[assignment]
            self.take("sign", "}")
        elif self.has("*"):
            return Repeated(node, 0, None)
        elif self.has("+"):
            return Repeated(node, 1, None)
        elif self.has("?"):
            return Repeated(node, 0, 1)
        else:
            return node
        if maximum is not None and (maximum < minimum or maximum < 1):
            self.refuse("a repetition from more to fewer")
        return Repeated(node, minimum, maximum)

    def _count(self) -> int:
        number = int(self.take("number"))
        if not 0 <= number <= 100_000:
            self.refuse(f"{number} repetitions")
        return number

    def _atom(self, rule: str | None, depth: int) -> Node:
        token = self.next
        if token.text == "~":
            noted = self._note("~", _ANY)
            self.at += 1
            self._atom(None, depth)
            return noted
        if self.has("("):
            node = self._choice(rule, depth + 1)
            self.take("sign", ")")
            return node
        if self.has("["):
            node = self._choice(rule, depth + 1)
            self.take("sign", "]")
            return Repeated(node, 0, 1)
        node = self._value(token)
        if rule is None and isinstance(node, Rule):
            self.refuse_at(f"the rule {token.text!r} in a terminal", token.line)
        return node if rule is None or isinstance(node, Rule) else Terminal(node)

    def _value(self, token: _Token) -> Node:
        if token.kind == "rule":
            self.at += 1
            if self.next.text == "::" or (self.next.text == "{" and self.tokens[self.at + 1].kind in ("rule", "text")):
                self.refuse(f"parameters of {token.text!r}")
            return Rule(token.text, token.line)
        if token.kind == "terminal":
            node = self._terminal(token.text)
            self.at += 1
            return node
        if token.kind == "text":
            return self._text()
        if token.kind == "expression":
            body, _, flags = token.text[1:].rpartition("/")
            node = self._expression(body, flags, token.line)
            self.at += 1
            return node
        if token.text not in ("%json", "%regex"):
            self.refuse()
        has_escapes = token.text == "%json" or "\\" in json.dumps(token.value, ensure_ascii=False)
        noted = self._note(token.text, _ANY if has_escapes else frozenset())
        self.at += 1
        return noted

    def _text(self) -> Node:
        text, flags = self._string()
        if not self.has(".."):
            self.grammar.special |= SPECIAL & set(text)
            return literal(text, flags)
        last, more = self._string()
        if flags or more or len(text) != 1 or len(last) != 1 or last < text:
            self.refuse(f"the range up to {last!r}")
        special = frozenset(each for each in SPECIAL if text <= each <= last)
        self.grammar.special |= special
        return Chars(f"[{escaped(text)}-{escaped(last)}]", special)

    def _string(self) -> tuple[str, str]:
        written = self.next.text
        body, flags = (written[:-1], "i") if written.endswith("i") else (written, "")
        try:
            text = json.loads(re.sub(r"\\(.)", lambda it: r"\u00" if it[1] == "x" else it[0], body, flags=re.DOTALL))
        except ValueError:
            self.refuse()
        self.take("text")
        return text, flags

    def _expression(self, body: str, flags: str, line: int) -> Node:
        def refuse(allowed: str) -> NoReturn:
            self.refuse_at(f"/{body}/{flags}", line, allowed)

        node = rust_expression.tree(body, flags, refuse)
        self.grammar.special |= specials(node)
        return node


def specials(node: Node) -> frozenset[str]:
    """Return the ``SPECIAL`` characters that the node's texts may contain."""
    if isinstance(node, Chars | Unwritable):
        return node.special
    if isinstance(node, Sequence):
        return frozenset().union(*map(specials, node.items))
    if isinstance(node, Choice):
        return frozenset().union(*map(specials, node.options))
    return specials(node.node) if isinstance(node, Repeated | Terminal) else frozenset()
