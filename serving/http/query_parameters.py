"""Readers of a request's query parameters, by the schemas that the document shows of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..frontend.operation import Request
from ..interface.errors import InvalidField


def parameters(request: Request, known: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the query parameters. Raises ``InvalidField`` for one that is not ``known``, or not of its enumeration."""
    given = request.single_parameters()
    for name, value in given.items():
        if name not in known:
            raise InvalidField(name[:80], value, "no such parameter; expected one of " + ", ".join(known))
        options = known[name].get("enum")
        if options is not None and value not in options:
            raise InvalidField(name, value, "one of " + ", ".join(options))
    return given


def limit_of(given: dict[str, str], maximum: int, default: int) -> int:
    """Return the parameter ``limit``, from 1 to ``maximum``. Raises ``InvalidField``."""
    value = given.get("limit")
    if value is None:
        return default
    if not (value.isascii() and value.isdigit()) or len(value) > 9 or not 1 <= int(value) <= maximum:
        raise InvalidField("limit", value, f"an integer from 1 to {maximum}")
    return int(value)


def refuse_beside_export(given: Mapping[str, str], names: Sequence[str], form: str, what: str) -> None:
    """Raise ``InvalidField`` for parameters that select or page, beside a format that has every ``what``."""
    for name in names:
        if name in given:
            raise InvalidField(name, given[name], f"no value with format={form}: an export has every {what}")
