"""``--schema``: the JSON schema that replies are held to, from a file, as JSON, or in a short notation of fields.

The notation is that of the ``llm`` command: ``name, age int, bio: in one sentence`` — fields separated by commas or
lines, each with a type (``str``, which is the default, ``int``, ``float``, ``bool``) and a description after a colon.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from ...system.escape import visible_line

TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_BYTES = 2**20


def response_format(given: str) -> dict[str, Any]:
    """Return the request field for a schema. Raises ``UsageError``."""
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema_of(given), "strict": True}}


def schema_of(given: str) -> dict[str, Any]:
    """Return the JSON schema that ``given`` is, names or describes. Raises ``UsageError``."""
    if given.lstrip().startswith("{"):
        return _parsed(given, "")
    try:
        file = Path(given).expanduser()
        is_file = file.is_file()
    except (OSError, ValueError, RuntimeError):  # too long for a name, or no home
        is_file = False
    if is_file:
        try:
            with file.open("rb") as opened:
                return _parsed(opened.read(MAX_BYTES).decode(), f"{given}: ")
        except (OSError, UnicodeDecodeError) as error:
            raise _refused(f"{given}: {getattr(error, 'strerror', None) or 'is not text'}") from None
    if given.endswith(".json"):
        raise _refused(f"{given}: there is no such file")
    return _of_fields(given)


def _parsed(text: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(f"{place}not JSON: {error}") from None
    if not isinstance(found, dict):
        raise _refused(f"{place}a schema is a JSON object")
    return found


def _of_fields(given: str) -> dict[str, Any]:
    # where there are lines, a comma may be part of a description
    listed = given.splitlines() if "\n" in given else given.split(",")
    properties: dict[str, Any] = {}
    for one in filter(None, (entry.strip().rstrip(",") for entry in listed)):
        head, _, description = one.partition(":")
        name, *types = head.split() or [""]
        if not _NAME.fullmatch(name) or len(types) > 1:
            raise _refused(f"{one!r} is no field; expected NAME, NAME TYPE or NAME TYPE: DESCRIPTION")
        kind = types[0] if types else "str"
        if kind not in TYPES:
            raise _refused(f"{name}: {kind!r} is not a type; expected one of {', '.join(TYPES)}")
        if name in properties:
            raise _refused(f"{name} is named twice")
        properties[name] = {"type": TYPES[kind]}
        if description.strip():
            properties[name]["description"] = description.strip()
    if not properties:
        raise _refused("it has no field; expected FILE, JSON, or fields such as 'name, age int'")
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _refused(problem: str) -> click.UsageError:
    return click.UsageError(f"--schema: {visible_line(problem)}")
