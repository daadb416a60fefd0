"""Constraints on a text: as the caller states them (``Constraint``) and as the engine applies them (``Grammar``)."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

GIVEN = "the grammar"  # in errors, instead of the grammar itself: it was derived from the caller's value
ConstraintKind: TypeAlias = Literal["text", "json_object", "json_schema", "regex", "choice", "lark"]


class Constraint(Struct, frozen=True, kw_only=True):
    """A constraint as a caller states it.

    ``kind`` "text" is any text, without a grammar: a request uses it to lift a constraint that the model was logged
    with. ``value`` is None for "text" and "json_object", a JSON schema (an object, true or false) for "json_schema", an
    expression for "regex", a tuple of texts for "choice", and a grammar in Lark's notation for "lark".

    With ``compact``, JSON of the kinds "json_object" and "json_schema" has no white space between its values.

    ``field`` is the path of the request field with the constraint ("response_format.json_schema.schema"), for errors.
    """

    kind: ConstraintKind
    value: Any = None
    compact: bool = False
    field: str


class Grammar(Struct, frozen=True, kw_only=True):
    """A constraint as an engine applies it.

    ``source`` is a grammar in the serialised form that ``llguidance.LLMatcher`` reads; ``field`` is the request field
    that it came from, for errors. With ``fast_forward``, tokens that the grammar alone determines are not computed one
    by one; this affects what a seed produces, so it is the same for the whole request. ``distinct_keys`` prevents
    duplicate keys in JSON objects whose keys the grammar leaves open.
    """

    source: str
    field: str
    fast_forward: bool = True
    distinct_keys: bool = False
