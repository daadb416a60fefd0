"""The argument ``tool_format``: how a model writes tool calls, for callers who do not want it detected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from ....serving.interface.errors import PackagingError, shown
from ....serving.interface.tool_format import ToolFormat
from ....serving.tool_calls.formats import FORMATS

Given: TypeAlias = str | Mapping[str, Any] | ToolFormat | None


def parse(given: Given) -> ToolFormat | None:
    """Parse a name, a format, or a dict of its fields. Fields left out come from the known format of that name, if any.

    Raises ``PackagingError``.
    """
    if given is None or isinstance(given, ToolFormat):
        return given
    if isinstance(given, str):
        if given not in FORMATS:
            raise PackagingError(f"tool_format: {shown(given)} is not known; expected one of {', '.join(FORMATS)}")
        return FORMATS[given]
    if not isinstance(given, Mapping):
        raise PackagingError(f"tool_format: {shown(given)} is not allowed; expected a name, a dict or a ToolFormat")
    name = given.get("name")
    known = FORMATS.get(name) if isinstance(name, str) else None
    fields = msgspec.to_builtins(known) if known is not None else {}
    try:
        found = msgspec.convert({**fields, **given}, ToolFormat)
    except msgspec.ValidationError as error:
        raise PackagingError(f"tool_format: {error}") from None
    _check(found)
    return found


def _check(format: ToolFormat) -> None:
    """Raise ``PackagingError`` for a format in which calls could not be told apart from each other or from text."""
    if format.layout == "object" and not format.arguments_keys:
        raise PackagingError("tool_format: arguments_keys is empty; expected the name under which arguments stand")
    if format.layout != "object" and not format.name_end:
        raise PackagingError("tool_format: name_end is empty; expected what stands between a name and its arguments")
    if format.arguments == "parameters" and not (format.parameter_begin and format.key_end and format.value_end):
        raise PackagingError("tool_format: parameters need parameter_begin, key_end and value_end")
    if format.reasoning is not None and not (format.reasoning.begin.strip() and format.reasoning.end.strip()):
        raise PackagingError("tool_format: reasoning needs begin and end")
