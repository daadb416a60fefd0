"""From what a caller says a text must be to the grammar that an engine holds it to. Nothing is compiled here: the
engine does that, beside its loop. Works without torch, in any process.

Sources are llguidance's serialised form: ``{"grammars": [{"json_schema": …} or {"lark_grammar": …}]}``. A schema has
our options under the key "x-guidance", which is why a caller's schema may not have it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..constraint import Constraint, Grammar
from ..errors import InvalidField
from .document import is_unicode
from .expression import in_slashes, lark_expression, literal
from .lark import checked_lark
from .quoted_lark import quoted_lark
from .raw_lark import ended_lark
from .schema import normalized

MAX_CHOICES = 10_000
MAX_CHOICES_CHARS = 512 * 1024

JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ",[ ]?",
    "key_separator": ":[ ]?",
    "json_allowed_escapes": 'nrbtf\\"',  # no \\u: each text has one spelling, so that a key is known by its bytes
}


def grammar_of(constraint: Constraint) -> Grammar:
    """Raises ``InvalidField``, naming the constraint's field; in a schema also the keyword and where it stands (a JSON
    pointer)."""
    kind, value, field = constraint.kind, constraint.value, constraint.field
    assert kind != "text"  # any text has no grammar
    if kind in ("json_object", "json_schema"):
        schema, has_open_keys = _schema_and_keys({"type": "object"} if kind == "json_object" else value, field)
        source = _dumps({"grammars": [{"json_schema": schema}]})
        return Grammar(source=source, field=field, distinct_keys=has_open_keys)
    if kind == "lark":
        lark, has_open_keys = checked_lark(value, field, _schema_and_keys)
        return Grammar(source=_lark_source(lark), field=field, distinct_keys=has_open_keys)
    return Grammar(source=_lark_source(_EXPRESSIONS[kind](value, field)), field=field)


def quoted_grammar(constraint: Constraint) -> Grammar:
    """What a text in Lark's notation is held to where it stands between the quotes of JSON, without these."""
    assert constraint.kind == "lark"
    lark, _ = checked_lark(constraint.value, constraint.field, _schema_and_keys)
    return Grammar(source=_lark_source(quoted_lark(lark, constraint.field)), field=constraint.field)


def ended_grammar(constraint: Constraint, end: str, marks: Sequence[str]) -> Grammar | None:
    """What a text in Lark's notation and ``end`` behind it are held to, where a terminal could go on over ``end``; None
    where ``grammar_of`` with ``end`` behind it does. ``marks``: what the text may not have in it."""
    lark, _ = checked_lark(constraint.value, constraint.field, _schema_and_keys)
    ended = ended_lark(lark, end, marks)
    return None if ended is None else Grammar(source=_lark_source(ended), field=constraint.field)


def schema_value(schema: Any, field: str) -> dict[str, Any]:
    """A JSON schema (an object, or true) as it may stand in a larger Lark grammar: ``%json`` and this, as JSON. Held to
    the same rules as ``response_format``; the larger grammar is one with ``distinct_keys``. Raises ``InvalidField``."""
    return _schema_and_keys(schema, field)[0]


def _schema_and_keys(schema: Any, field: str) -> tuple[dict[str, Any], bool]:
    """The schema with our options, and whether its texts may have keys that it does not name."""
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
