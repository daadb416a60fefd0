"""What form the texts of a request must have: which tools may be called, and the grammar that is held to."""

from __future__ import annotations

import functools

import msgspec

from ..constraint import Constraint, ConstraintKind, Grammar
from ..errors import InvalidField
from ..request import RawChat, RawSampling
from ..structured.grammar import grammar_of
from .endpoint import EndpointView

CACHED, CACHED_BYTES = 64, 2**18  # grammars kept, and the JSON that each may be of: clients send the same ones again
NO_GRAMMARS = "null: structured output is not supported by this endpoint's engine"


def check_choice(raw: RawChat) -> None:
    """Raises ``InvalidField`` for a choice of a tool that is not there."""
    if (choice := raw.tool_choice) is None:
        return
    known = [tool.name for tool in raw.tools or ()]
    if not known and choice.mode == "required" and not choice.names:
        raise InvalidField("tool_choice", "required", "none or auto: the request has no tools")
    for name in choice.names:
        if name not in known:
            listed = ", ".join(known[:16]) or "none"
            raise InvalidField("tool_choice", name, f"the name of one of the request's tools: {listed}")


def grammar(sampling: RawSampling, endpoint: EndpointView) -> Grammar | None:
    """The grammar of the form that a request asks for, None for any text. Raises ``InvalidField`` naming the field,
    and of a schema the keyword and its place."""
    constraint = sampling.constraint
    if constraint is None or constraint.kind == "text":
        return None
    if not endpoint.info.capabilities.structured_output:
        raise InvalidField(constraint.field, constraint.kind, NO_GRAMMARS)
    value = msgspec.json.encode(constraint.value)
    return _cached(constraint.kind, value, constraint.field) if len(value) <= CACHED_BYTES else grammar_of(constraint)


@functools.lru_cache(CACHED)
def _cached(kind: ConstraintKind, value: bytes, field: str) -> Grammar:
    return grammar_of(Constraint(kind=kind, value=msgspec.json.decode(value), field=field))
