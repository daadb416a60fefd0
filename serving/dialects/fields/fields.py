"""Request fields: a table names each field, how its value is read and where it goes.

The same tables give the MLflow signature and the OpenAPI document.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...interface.errors import InvalidField
from ...interface.readers import Reader, or_null
from ...interface.request import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One request field.

    ``target`` is the attribute of the raw request (``sampling.top_k`` for one of its sampling settings). None means
    that the field is checked but has no effect on this server; ``note`` says why. ``default`` applies on every
    endpoint. A default that models and endpoints can set is only described (``default_words``): a client generated from
    the schema would send ``default``.
    """

    name: str
    read: Reader[Any]
    target: str | None
    description: str = ""
    note: str = ""
    default: bool | float | str | None = None
    default_words: str = ""

    def replace(self, **changes: Any) -> Field:
        """Return this field as another dialect has it. A ``default`` also replaces the ``default_words``."""
        if "default" in changes:
            changes = {"default_words": "", **changes}
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The fields of one task in one dialect, by name.

    ``refused`` are fields that are known but not implemented; their readers accept only values that ask for nothing.
    Null always means the default. The field ``required`` has no default; "" means that no field is required.
    """

    required: str
    fields: Mapping[str, Field]
    refused: Mapping[str, Reader[Any]] = field(default_factory=dict)

    def read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``{target: value}`` of the fields that are present and not null. Raises ``InvalidField``."""
        found: dict[str, Any] = {}
        for name, value in body.items():
            known = self.fields.get(name) if isinstance(name, str) else None
            read = self.refused.get(name) if known is None else known.read
            if read is None:
                raise unknown_field(name, value, self.fields)
            if value is None:
                continue
            parsed = read(value, name)
            if known is not None and known.target is not None:
                found[known.target] = parsed
        if self.required and body.get(self.required) is None:
            raise InvalidField(self.required, None, self.fields[self.required].description)
        return found

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the bodies that ``read`` accepts, with the required field first."""
        properties: dict[str, Any] = {}
        for name, known in sorted(self.fields.items(), key=lambda entry: entry[0] != self.required):
            schema = dict(known.read.schema) if name == self.required else or_null(known.read.schema)
            note = f"({known.note})" if known.note else ""
            words = f"(default: {known.default_words})" if known.default_words else ""
            properties[name] = schema | {"description": " ".join(filter(None, (known.description, words, note)))}
            if known.default is not None:
                properties[name]["default"] = known.default
        for name, read in self.refused.items():
            properties[name] = or_null(read.schema) | {"description": "(refused where it asks for something)"}
        return {
            "type": "object",
            "required": [self.required] if self.required else [],
            "properties": properties,
            "additionalProperties": False,
        }


def unknown_field(name: Any, value: Any, known: Mapping[str, Any] | Sequence[str], parent: str = "") -> InvalidField:
    """Return the error for an unknown field, with the nearest known name."""
    shown_name = str(name)[:64]
    near = nearest(shown_name, known)
    hint = f"; did you mean {near!r}?" if near else ""
    return InvalidField(parent + shown_name, value, f"no such field{hint}")


def nearest(name: str, known: Mapping[str, Any] | Sequence[str]) -> str | None:
    """Return the known name that ``name`` may be a misspelling of, or None."""
    return next(iter(difflib.get_close_matches(name[:64], list(known), n=1)), None)


# The field that decides which task a body is for.
CONTENT: Mapping[str, Task] = {
    "messages": "chat",
    "prompt": "completions",
    "input": "embeddings",
    "query": "score",
    "text_1": "score",
}


def _without_content(fields: list[str], allowed: str, *, several: bool) -> InvalidField:
    """Return the error for a body whose task is not known; it names the fields of the body, which are no value."""
    error = InvalidField("body", fields, allowed)
    has = ", ".join(name[:64] for name in fields) or "no field"
    error.message = f"body: it has {has}{'' if several else ' alone'}; expected {allowed}"
    error.args = (error.message,)
    return error


def task_of(body: Any, task: Task | None) -> Task:
    """Return ``task`` or, if it is None, the task of the body's ``CONTENT`` field. Raises ``InvalidField``."""
    if not isinstance(body, dict):
        raise InvalidField("body", body, "a JSON object")
    if task is not None:
        return task
    found = [name for name in CONTENT if body.get(name) is not None]
    if len(found) != 1:
        *names, last = CONTENT
        allowed = f"exactly one of {', '.join(names)} and {last}"
        raise _without_content(found or sorted(map(str, body))[:8], allowed, several=bool(found))
    return CONTENT[found[0]]
