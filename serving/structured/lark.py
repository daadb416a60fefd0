"""Callers' grammars: llguidance's variant of Lark's notation, or GBNF (``root ::= …``), which is converted to it.

A caller's grammar may only describe text. Anything beyond that is refused with its name: special tokens, which would
end a turn or begin another, options of sampling and of the engine, other grammars. A schema in a grammar (``%json``)
follows the rules of all schemas. Whether the grammar is otherwise valid is found out when it is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

from ..interface.errors import InvalidField, reason
from .document import is_unicode

MAX_CHARS = 65_536
MAX_GBNF_RULES = 256

_GBNF = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")
_TOKENS = re.compile(
    r"""(?P<blank>\s+)|(?P<comment>(?://|\#)[^\n]*)|(?P<text>"(?:[^"\\\n]|\\.)*"i?)|(?P<expression>/(?:[^/\\\n]|\\.)+/[imslux]*)"""
    r"""|(?P<command>%[a-z]+)|(?P<special><[^>\n]*>)|(?P<other_grammar>@[\w-]*)|(?P<name>\w[\w-]*)|(?P<sign>.)""",
    re.DOTALL,
)
_COMMANDS = {"%json", "%regex", "%ignore", "%import", "%llguidance"}
_RULE_OPTIONS = {"temperature", "max_tokens", "stop", "stop_capture"}
_OWN_OPTIONS = {"no_forcing", "allow_initial_skip", "ignore_once"}


_Schema: TypeAlias = Callable[[Any, str], tuple[dict[str, Any], bool]]


def checked_lark(value: Any, field: str, schema: _Schema) -> tuple[str, bool]:
    """Return the grammar in Lark's notation, and whether schemas in it allow keys that they do not name.

    ``schema`` rewrites each schema, and returns the same information about it. Raises ``InvalidField``.
    """
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_CHARS or not is_unicode(value):
        raise InvalidField(field, value, f"a grammar in Lark's notation or GBNF, of at most {MAX_CHARS:,} characters")
    checker = _Checker(_from_gbnf(value, field) if _GBNF.search(value) else value, field, schema)
    return checker.checked(), checker.has_open_keys


def _from_gbnf(text: str, field: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark  # imported when first needed, because it takes 40 ms

    if len(_GBNF.findall(text)) > MAX_GBNF_RULES:
        raise InvalidField(field, "the grammar", f"at most {MAX_GBNF_RULES} rules in GBNF")
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # its parser may raise any error
        raise InvalidField(field, "the grammar", f"a grammar in GBNF: {reason(error)}") from None


class _Checker:
    def __init__(self, text: str, field: str, schema: _Schema) -> None:
        self.text, self.field, self.schema = text, field, schema
        self.has_open_keys = False
        self.at = 0
        self.written: list[str] = []

    def checked(self) -> str:
        brackets = 0
        while self.at < len(self.text):
            found = _TOKENS.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            self.written.append(found[0])
            kind = found.lastgroup
            if kind == "special":
                self._refuse(found[0], "a grammar of texts alone: no special tokens")
            elif kind == "other_grammar":
                self._refuse(found[0], "a grammar that needs no other one")
            elif kind == "command":
                self._command(found[0])
            elif kind == "sign":
                brackets += (found[0] == "[") - (found[0] == "]")
            elif kind == "name" and brackets > 0 and found[0] in _RULE_OPTIONS:
                self._refuse(found[0], "rules without options of sampling; lazy and suffix are allowed")
        return "".join(self.written)

    def _refuse(self, what: str, allowed: str) -> NoReturn:
        line = self.text.count("\n", 0, self.at) + 1
        raise InvalidField(self.field, what, f"{allowed} (line {line})")

    def _command(self, name: str) -> None:
        if name not in _COMMANDS:
            self._refuse(name, "one of " + ", ".join(sorted(_COMMANDS)))
        if name in ("%json", "%llguidance", "%regex"):
            value = self._json(name)
            if name == "%json":
                value, is_open = self.schema(value, self.field)
                self.has_open_keys = self.has_open_keys or is_open
            if name == "%llguidance" and (not isinstance(value, dict) or value.keys() - _OWN_OPTIONS):
                self._refuse(name, "no options but " + ", ".join(sorted(_OWN_OPTIONS)))
            self.written.append(" " + json.dumps(value))

    def _json(self, name: str) -> Any:
        start = re.compile(r"\s*").match(self.text, self.at)
        assert start is not None
        try:
            value, self.at = json.JSONDecoder().raw_decode(self.text, start.end())
        except (ValueError, RecursionError) as error:
            self._refuse(name, f"JSON behind it: {reason(error)}")
        return value
