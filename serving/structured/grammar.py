"""Turns a caller's constraint on a text into the grammar that an engine enforces. Nothing is compiled here: the engine
does that, outside its loop. This works without torch, in any process.

Sources are in llguidance's serialised form: ``{"grammars": [{"json_schema": …} or {"lark_grammar": …}]}``. A schema
has the server's options under the key "x-guidance"; therefore a caller's schema may not have that key.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..interface.constraint import Constraint, Grammar
from ..interface.errors import InvalidField
from .document import is_unicode
from .expression import in_slashes, lark_expression, literal
from .lark import checked_lark
from .lark_escapes import ended_lark
from .lark_strings import quoted_lark
from .schema import normalized

MAX_CHOICES = 1024
MAX_CHOICES_CHARS = 512 * 1024

JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ",[ ]?",
    "key_separator": ":[ ]?",
    "json_allowed_escapes": 'nrbtf\\"',  # no \\u: each text has one spelling, so that a key is known by its bytes
}
_COMPACT = {**JSON_OPTIONS, "item_separator": ",", "key_separator": ":"}


def grammar_of(constraint: Constraint) -> Grammar:
    """Return the grammar of a constraint.

    Raises ``InvalidField``, which names the constraint's field, and in a schema also the keyword and its place (a JSON
    pointer).
    """
    kind, value, field = constraint.kind, constraint.value, constraint.field
    assert kind != "text"  # any text has no grammar
    if kind in ("json_object", "json_schema"):
        schema, has_open_keys = _schema_and_keys({"type": "object"} if kind == "json_object" else value, field)
        if constraint.compact:
            schema["x-guidance"] = _COMPACT
        source = _dumps({"grammars": [{"json_schema": schema}]})
        return Grammar(source=source, field=field, distinct_keys=has_open_keys)
    if kind == "lark":
        lark, has_open_keys = checked_lark(value, field, _schema_and_keys)
        return Grammar(source=_lark_source(lark), field=field, distinct_keys=has_open_keys)
    return Grammar(source=_lark_source(_EXPRESSIONS[kind](value, field)), field=field)


def quoted_grammar(constraint: Constraint) -> Grammar:
    """Return the grammar of a constraint in Lark's notation for a text between the quotes of a JSON string.

    The quotes are not part of it.
    """
    assert constraint.kind == "lark"
    lark, _ = checked_lark(constraint.value, constraint.field, _schema_and_keys)
    return Grammar(source=_lark_source(quoted_lark(lark, constraint.field)), field=constraint.field)


def ended_grammar(constraint: Constraint, end: str, marks: Sequence[str]) -> Grammar | None:
    """Return the grammar of a constraint in Lark's notation followed by ``end``, if a terminal could run past ``end``.

    None if ``grammar_of`` followed by ``end`` does the same. ``marks`` are texts that the text must not contain.
    """
    lark, _ = checked_lark(constraint.value, constraint.field, _schema_and_keys)
    ended = ended_lark(lark, end, marks)
    return None if ended is None else Grammar(source=_lark_source(ended), field=constraint.field)


def schema_value(schema: Any, field: str) -> dict[str, Any]:
    """Return a JSON schema (an object, or true) for use in a larger Lark grammar, as JSON after ``%json``.

    The same rules apply as for ``response_format``. The larger grammar needs ``distinct_keys``. Raises
    ``InvalidField``.
    """
    return _schema_and_keys(schema, field)[0]


def _schema_and_keys(schema: Any, field: str) -> tuple[dict[str, Any], bool]:
    """Return the schema with the server's options, and whether its texts may have keys that it does not name."""
    made, has_open_keys = normalized(schema, field)
    return {**made, "x-guidance": JSON_OPTIONS}, has_open_keys


def _regex(value: Any, field: str) -> str:
    return f"start: /{lark_expression(value, field)}/"


def _choice(value: Any, field: str) -> str:
    written = "|".join(map(literal, _checked_choices(value, field)))
    return f"start: /{in_slashes(written)}/"


_EXPRESSIONS = {"regex": _regex, "choice": _choice}


def _checked_choices(value: Any, field: str) -> list[str]:
    allowed = f"a list of 1 to {MAX_CHOICES} different texts, none empty"
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidField(field, value, allowed)
    seen = set()
    for index, choice in enumerate(value):
        if not isinstance(choice, str) or not choice or choice in seen or not is_unicode(choice):
            raise InvalidField(f"{field}[{index}]", choice, allowed)
        seen.add(choice)
    if sum(map(len, value)) > MAX_CHOICES_CHARS:
        raise InvalidField(field, value, f"at most {MAX_CHOICES_CHARS:,} characters in all")
    return list(value)


def _lark_source(lark: str) -> str:
    return _dumps({"grammars": [{"lark_grammar": lark}]})


def _dumps(source: dict[str, Any]) -> str:
    return json.dumps(source, ensure_ascii=False, separators=(",", ":"))
