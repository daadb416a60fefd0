"""Requests that compare texts: readers of their texts, and a table whose fields may have several names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...interface.errors import InvalidField
from ...interface.readers import any_of, reader, string
from ...interface.request import MAX_PROMPTS, RawScore
from .fields import Table, unknown_field

_TEXT = any_of(
    string.schema,
    {"type": "object", "required": ["text"], "properties": {"text": string.schema}, "additionalProperties": False},
)


@reader(**any_of(*_TEXT["anyOf"], {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS}))
def texts(value: Any, path: str) -> tuple[str, ...]:
    """Read a text or a list of texts, each a string or ``{"text": …}`` as in Jina's and Cohere's APIs."""
    if isinstance(value, str | dict):
        return (_text(value, path),)
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_PROMPTS:
        raise InvalidField(path, value, f"a text, or a list of 1 to {MAX_PROMPTS} texts")
    return tuple(_text(entry, f"{path}[{i}]") for i, entry in enumerate(value))


@reader(type="string")
def query(value: Any, path: str) -> tuple[str, ...]:
    """Read the one text that all others are compared with."""
    return (string(value, path),)


def _text(value: Any, path: str) -> str:
    if not isinstance(value, dict):
        return string(value, path)
    for key in value:
        if key != "text":
            raise unknown_field(key, value[key], ("text",), f"{path}.")
    return string(value.get("text"), f"{path}.text")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTable(Table):
    """A table with ``forms``: the pairs of names that the two sides may have. A body uses one of these pairs."""

    forms: tuple[tuple[str, str], ...]

    def read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        form = self._form(body)
        found = Table.read(dataclasses.replace(self, required=form[0]), body)
        queries, documents = (len(found[side]) for side in ("queries", "documents"))
        if queries not in (1, documents):
            raise InvalidField(form[1], f"{documents} texts", f"as many as {form[0]} has, {queries}, which may be one")
        return found | {"names": form, "ranked": form[0] == "query"}

    def _form(self, body: Mapping[str, Any]) -> tuple[str, str]:
        names = {name for form in self.forms for name in form if body.get(name) is not None}
        for form in self.forms:
            if names == set(form):
                return form
        for form in self.forms:
            if missing := [name for name in form if names < set(form) and name not in names]:
                raise InvalidField(missing[0], None, self.fields[missing[0]].description)
        pairs = " or ".join(" and ".join(form) for form in self.forms)
        raise InvalidField(min(names), body[min(names)], f"null, or alone with its other side: {pairs}")

    def schema(self) -> dict[str, Any]:
        return any_of(*map(self._form_schema, self.forms))

    def _form_schema(self, form: tuple[str, str]) -> dict[str, Any]:
        found = Table.schema(dataclasses.replace(self, required=form[0]))
        properties = found["properties"]
        for name in {name for other in self.forms for name in other}:
            if name not in form:
                properties[name] = {"type": "null"}
        properties[form[1]] = {**self.fields[form[1]].read.schema, "description": self.fields[form[1]].description}
        return {**found, "required": list(form)}


def read_score(found: dict[str, Any]) -> RawScore:
    """Build a request from the fields that a ``ScoreTable`` has read.

    Raises ``InvalidField`` for fields of a ranking in a request that asks for no ranking.
    """
    if not found["ranked"]:
        for name in ("top_n", "return_documents"):
            if found.get(name) is not None:
                raise InvalidField(name, found[name], f"null with {found['names'][0]}: scores come in the texts' order")
    return RawScore(**found)
