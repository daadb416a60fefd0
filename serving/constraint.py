"""What a text must be: as a caller says it (``Constraint``) and as an engine holds to it (``Grammar``)."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

GIVEN = "the grammar"  # in errors: what is held to was made of a caller's value, and is nothing that the caller wrote
ConstraintKind: TypeAlias = Literal["text", "json_object", "json_schema", "regex", "choice", "lark"]


class Constraint(Struct, frozen=True, kw_only=True):
    """``kind`` "text" is any text: what a request says against a constraint that its model was logged with, and no
    grammar. ``value``: None for it and for "json_object", a JSON schema (an object, or true or false) for
    "json_schema", an expression for "regex", a tuple of texts for "choice", a grammar in Lark's notation for "lark".

    ``field`` is the path of the request field that says it ("response_format.json_schema.schema"), for errors.
    """

    kind: ConstraintKind
    value: Any = None
    field: str


class Grammar(Struct, frozen=True, kw_only=True):
    """``source`` is a grammar in the serialised form that ``llguidance.LLMatcher`` reads, ``field`` the request field
    that it came from, for errors. ``fast_forward``: tokens that the grammar alone decides are not computed one by one;
    it is a part of what a seed means, and so the same for the whole of a request. ``distinct_keys``: keys of JSON's
    objects that the grammar leaves open are kept from coming twice."""

    source: str
    field: str
    fast_forward: bool = True
    distinct_keys: bool = False
