"""Parse the part of Go's template language that Ollama's chat templates are written in.

``{{ if }}``, ``{{ else if }}``, ``{{ else }}``, ``{{ range .Messages }}``, ``{{ end }}``, fields, string literals,
comments, variables, trim markers, the functions ``and``, ``or``, ``not``, ``eq``, ``ne``, and ``printf`` with ``%s``;
the idiom by which templates ask for the last message; nothing else. The language: https://pkg.go.dev/text/template
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from .....serving.interface.errors import PackagingError, shown

ACTION = re.compile(
    r"\{\{(?P<left>-(?=\s))?(?P<body>(?:\"(?:\\.|[^\"\\])*\"|`[^`]*`|[^\"`])*?)(?P<right>(?<=\s)-)?\}\}", re.DOTALL
)
TOKEN = re.compile(r'\s*("(?:\\.|[^"\\])*"|`[^`]*`|\$?\.?[A-Za-z_][\w.]*|\$\.?[\w.]*|\.[\w.]*|[()]|-?\d+|:=|,|\S)')
ASSIGNMENT = re.compile(r"\$(\w+)\s*:?=\s*(.+)", re.DOTALL)
LAST = re.compile(r"(\$\w+)\s*:=\s*eq\s*\(len\s*\(slice\s+\$\.Messages\s+(\$\w+)\s*\)\s*\)\s*1")
RANGE = re.compile(r"range\s+(?:(\$\w+)\s*,\s*(\$\w+)\s*:=\s*)?(\$?)\.Messages")
OF_CHAT = {"System": "system", "Prompt": "prompt", "Response": "response"}
OF_MESSAGE = {"Role": "m['role']", "Content": "m['content']"}
# what an Ollama server sets for tools, for text around a gap and for thinking; here these are never set
UNSET = ("Tools", "ToolCalls", "ToolName", "ToolCallID", "Suffix", "Think", "IsThinkSet", "Thinking", "ThinkLevel")


class Unconverted(PackagingError):
    """A part of a template that has no conversion; the message names its line."""


@dataclass(frozen=True)
class Output:
    """Text that is written: an expression of Jinja, and whether it is the model's response."""

    expression: str
    is_response: bool = False


@dataclass(frozen=True)
class If:
    condition: str
    then: list[Any]
    otherwise: list[Any]


@dataclass(frozen=True)
class Range:
    body: list[Any]


@dataclass(frozen=True)
class Assignment:
    """A value for a variable of the template, which is an attribute of the namespace ``v``."""

    name: str
    expression: str


@dataclass(frozen=True)
class Continue:
    """The end of a message's turn in a range."""


@dataclass
class Parser:
    """A template's actions, taken one after another. ``unset`` collects the fields that are never set here."""

    source: str
    parts: list[tuple[int, str, bool]] = field(default_factory=list)  # line, text, whether it is an action
    place: int = 0
    variables: dict[str, str] = field(default_factory=dict)
    in_range: bool = False
    unset: set[str] = field(default_factory=set)

    def parse(self) -> list[Any]:
        """Return the nodes of the template. Raises ``Unconverted``."""
        self.parts = _parts(self.source)
        nodes, ending = self._nodes()
        if ending:
            raise self._error(ending)
        return nodes

    def _nodes(self) -> tuple[list[Any], str]:
        """Return the nodes up to the ``else`` or ``end`` that belongs to an earlier action, and that word."""
        found: list[Any] = []
        while self.place < len(self.parts):
            _, text, is_action = self.parts[self.place]
            self.place += 1
            if not is_action:
                found.append(Output(literal(text)))
                continue
            word = text.split()[0] if text.split() else ""
            if word in ("else", "end"):
                return found, text
            if word == "if":
                found += self._branch(text.removeprefix("if"))
            elif word == "range":
                found += self._range(text)
            elif (last := LAST.fullmatch(text)) is not None and self.variables.get(last[2]) == "index":
                self.variables[last[1]] = "loop.last"
            elif text == "continue" and self.in_range:
                found.append(Continue())
            elif (assigned := ASSIGNMENT.fullmatch(text)) is not None:
                value = self._expression(assigned[2])
                self.variables[f"${assigned[1]}"] = f"v.{assigned[1]}"
                found.append(Assignment(assigned[1], str(value)))
            elif text:
                found += self._output(text)
        return found, ""

    def _branch(self, condition: str) -> list[Any]:
        line = self.place
        value = self._expression(condition)
        then: list[Any] = []
        if value is False:  # what it guards is never written, and may hold what has no conversion
            ending = self._skip()
        else:
            then, ending = self._nodes()
        otherwise: list[Any] = []
        if ending.startswith("else if"):
            otherwise = self._branch(ending.removeprefix("else if"))
        elif ending == "else":
            if value is True:
                ending = self._skip()
            else:
                otherwise, ending = self._nodes()
        if not ending:
            self.place = line
            raise self._error(f"if{condition}: its end is missing")
        if value is True or value is False:
            return then if value else otherwise
        return [If(str(value), then, otherwise)]

    def _skip(self) -> str:
        """Pass over actions up to the ``else`` or ``end`` of the present one, and return it."""
        depth = 0
        while self.place < len(self.parts):
            _, text, is_action = self.parts[self.place]
            self.place += 1
            word = text.split()[0] if is_action and text.split() else ""
            if word in ("if", "range", "with", "define", "block"):
                depth += 1
            elif word == "end" and depth:
                depth -= 1
            elif word in ("else", "end") and not depth:
                return text
        return ""

    def _range(self, text: str) -> list[Any]:
        found = RANGE.fullmatch(text)
        if found is None or self.in_range:
            raise self._error(text)
        before = dict(self.variables)
        if found[1]:
            self.variables |= {found[1]: "index", found[2]: "m"}
        self.in_range = True
        body, ending = self._nodes()
        self.in_range = False
        self.variables = before
        if ending != "end":
            raise self._error(ending or text)
        return [Range(body)]

    def _output(self, text: str) -> list[Any]:
        value = self._expression(text)
        if value is False:
            return []
        return [Output(str(value), is_response=value == "response")]

    def _expression(self, text: str) -> str | bool:
        """Return an expression of Jinja; a bool where it is the same for every conversation."""
        words = TOKEN.findall(text)
        value, rest = self._call(words, text)
        if rest:
            raise self._error(text)
        return value

    def _call(self, words: list[str], text: str) -> tuple[str | bool, list[str]]:
        if not words:
            raise self._error(text)
        name, rest = words[0], words[1:]
        if name not in ("and", "or", "not", "eq", "ne", "printf"):
            return self._operand(words, text)
        operands: list[str | bool] = []
        while rest and rest[0] != ")":
            value, rest = self._operand(rest, text)
            operands.append(value)
        if name == "printf" and operands and (text_of := _printed(operands)) is not None:
            return text_of, rest
        if name == "not" and len(operands) == 1:
            return _negated(operands[0]), rest
        if name in ("and", "or") and operands:
            return _joined(name, operands), rest
        if name in ("eq", "ne") and len(operands) >= 2 and not any(isinstance(one, bool) for one in operands):
            first, *others = operands
            if name == "ne" and len(others) == 1:
                return f"({first} != {others[0]})", rest
            if name == "eq":
                return "(" + " or ".join(f"{first} == {one}" for one in others) + ")", rest
        raise self._error(text)

    def _operand(self, words: list[str], text: str) -> tuple[str | bool, list[str]]:
        word, rest = words[0], words[1:]
        if word == "(":
            value, rest = self._call(rest, text)
            if not rest or rest[0] != ")":
                raise self._error(text)
            return value, rest[1:]
        if word[0] == "`":
            return literal(word[1:-1]), rest
        if word[0] == '"':
            try:
                return literal(json.loads(word)), rest
            except ValueError:
                raise self._error(text) from None
        return self._name(word, text), rest

    def _name(self, word: str, text: str) -> str | bool:
        known = self.variables.get(word, "m")
        if known != "m":
            return "loop.index0" if known == "index" else known
        if word.isdecimal():
            return word
        holder, _, name = word.rpartition(".")
        if name in UNSET and holder in ("", "$", *self.variables):
            self.unset.add(f".{name}")
            return False
        of_message = (holder == "" and self.in_range) or self.variables.get(holder) == "m"
        if of_message and word != name and name in OF_MESSAGE:
            return OF_MESSAGE[name]
        if not of_message and holder in ("", "$") and word != name and name in OF_CHAT:
            return OF_CHAT[name]
        if not of_message and holder in ("", "$") and word != name and name == "Messages":
            return "messages"
        raise self._error(text)

    def _error(self, text: str) -> Unconverted:
        line = self.parts[max(0, min(self.place, len(self.parts)) - 1)][0] if self.parts else 1
        return Unconverted(f"line {line} of the template: {shown('{{ ' + text.strip() + ' }}')} has no conversion")


def literal(text: str) -> str:
    """Return ``text`` as a string of Jinja."""
    return json.dumps(text, ensure_ascii=False)


def _negated(value: str | bool) -> str | bool:
    return not value if isinstance(value, bool) else f"(not {value})"


def _joined(name: str, operands: list[str | bool]) -> str | bool:
    ends = name == "or"  # the value that decides alone
    if any(one is ends for one in operands):
        return ends
    left = [one for one in operands if not isinstance(one, bool)]
    return f"({f' {name} '.join(left)})" if left else not ends


def _printed(operands: list[str | bool]) -> str | None:
    """Return what ``printf`` writes; None for other verbs than ``%s``."""
    form, *values = operands
    if not isinstance(form, str) or not form.startswith('"') or any(isinstance(one, bool) for one in values):
        return None
    pieces = json.loads(form).split("%s")
    if len(pieces) != len(values) + 1 or any("%" in piece for piece in pieces):
        return None
    joined = [literal(pieces[0])]
    for value, piece in zip(values, pieces[1:], strict=True):
        joined += [str(value), literal(piece)]
    return f"({' ~ '.join(joined)})"


def _parts(source: str) -> list[tuple[int, str, bool]]:
    """Divide a template into texts and actions, with the spaces trimmed that its markers trim."""
    found: list[tuple[int, str, bool]] = []
    place, trim = 0, False
    for action in ACTION.finditer(source):
        text = source[place : action.start()]
        text = text.lstrip() if trim else text
        text = text.rstrip() if action["left"] else text
        if text:
            found.append((source.count("\n", 0, place) + 1, text, False))
        body = action["body"].strip()
        if not (body.startswith("/*") and body.endswith("*/")):
            found.append((source.count("\n", 0, action.start()) + 1, body, True))
        place, trim = action.end(), action["right"] is not None
    rest = source[place:].lstrip() if trim else source[place:]
    if "{{" in rest:
        raise Unconverted(f"line {source.count(chr(10), 0, place) + 1} of the template: an action is not closed")
    return [*found, (source.count("\n", 0, place) + 1, rest, False)] if rest else found
