"""Fields that constrain the form of a text, read into a ``Constraint``.

``response_format`` is OpenAI's, ``guided_json`` and the like are vLLM's before 0.12, ``structured_outputs`` is what
replaced them. A request has at most one of them (``only``). ``structured`` checks what a schema, an expression or a
grammar contains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ...interface.constraint import Constraint
from ...interface.errors import InvalidField
from ...interface.readers import (
    Entry,
    Reader,
    any_of,
    boolean,
    list_of,
    obj,
    one_of,
    or_null,
    reader,
    record,
    string,
    text,
)

MAX_CHOICES = 1024  # of ``guided_choice``
NAME = text(re.compile("[a-zA-Z0-9_-]{1,64}"), "1 to 64 letters, digits, underscores and dashes")
_OBJECT_TEXT = re.compile(r"\s*\{[\s\S]*\}\s*")


@reader(type="object")
def json_object(value: Any, path: str) -> dict[str, Any]:
    """Read an object of JSON values; other values, which callers from Python may send, are refused."""
    found = obj(value, path)
    try:
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found))
    except (msgspec.MsgspecError, UnicodeError, TypeError, ValueError, OverflowError, RecursionError):
        raise InvalidField(path, value, "an object of JSON's values") from None
    return plain


@reader(**any_of({"type": "object"}, {"type": "string", "pattern": f"^{_OBJECT_TEXT.pattern}$"}))
def _schema_or_its_text(value: Any, path: str) -> dict[str, Any]:
    """Read a JSON schema, or the text of one, which vLLM's clients may send."""
    if not isinstance(value, str):
        return json_object(value, path)
    try:
        found = json.loads(string(value, path)) if _OBJECT_TEXT.fullmatch(value) else None
    except (ValueError, RecursionError):
        found = None
    if found is None:
        raise InvalidField(path, value, "a JSON schema, or the text of one")
    return json_object(found, path)


@reader(type="string", minLength=1)
def written(value: Any, path: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidField(path, value, "a text that is not empty")
    return string(value, path)


_CHOICES = list_of(written, f"a list of 1 to {MAX_CHOICES} texts that are not empty", minimum=1, maximum=MAX_CHOICES)

_JSON_SCHEMA = record(
    name=Entry(NAME, required="a name for the form"),
    description=Entry(string),
    schema=Entry(json_object, required="a JSON schema"),
    strict=Entry(boolean, "the schema is held to with true and with false"),
)
_FORMATS = ("text", "json_object", "json_schema", "json", "regex")
# Where each kind of format has its content. ``value`` is text-generation-inference's, which the client of the Hugging
# Face Hub sends; ``schema`` of a json_object is llama.cpp's, and that of several hosted services.
_CONTENTS: Mapping[str, Mapping[str, tuple[str, Reader[Any]]]] = {
    "text": {},
    "json_object": {"value": ("json_schema", json_object), "schema": ("json_schema", json_object)},
    "json_schema": {"json_schema": ("json_schema", _JSON_SCHEMA), "value": ("json_schema", _JSON_SCHEMA)},
    "json": {"value": ("json_schema", json_object)},
    "regex": {"value": ("regex", written)},
}
_BARE = ("text", "json_object")  # may have no content
_CONTENT_NAMES = ("json_schema", "value", "schema")


def _format_schema() -> dict[str, Any]:
    """Return one alternative for each place of a content, in which all other places are null."""
    unset = {name: {"type": "null"} for name in _CONTENT_NAMES}

    def form(kind: str, required: list[str], **content: Any) -> dict[str, Any]:
        return {
            "type": "object",
            "required": ["type", *required],
            "properties": {"type": {"const": kind}} | unset | content,
            "additionalProperties": False,
        }

    filled = [
        form(kind, [name], **{name: dict(read.schema)})
        for kind, places in _CONTENTS.items()
        for name, (_, read) in places.items()
    ]
    return any_of(*(form(kind, []) for kind in _BARE), *filled)


@reader(**_format_schema())
def response_format(value: Any, path: str) -> Constraint:
    """Read OpenAI's ``response_format``, and the forms that other servers have for the same."""
    if not isinstance(value, dict):
        raise InvalidField(path, value, 'an object such as {"type": "json_object"}')
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise InvalidField(f"{path}.type", kind, "one of " + ", ".join(_FORMATS))
    places = _CONTENTS[kind]
    known = ", ".join(("type", *places))
    given = {name: content for name, content in value.items() if name != "type" and content is not None}
    for name, content in value.items():
        if name != "type" and name not in _CONTENT_NAMES:
            raise InvalidField(f"{path}.{name}", content, f"no such field; expected one of {known}")
    for name, content in given.items():
        if name not in places:
            raise InvalidField(f"{path}.{name}", content, f"null with type {kind}")
    if not given and kind in _BARE:
        return Constraint(kind="text" if kind == "text" else "json_object", field=path)
    (name, content), *others = given.items() or {next(iter(places)): None}.items()
    if others:
        raise InvalidField(f"{path}.{others[0][0]}", others[0][1], f"null: {path}.{name} says it")
    made, read = places[name]
    found, where = read(content, f"{path}.{name}"), f"{path}.{name}"
    if read is _JSON_SCHEMA:
        return Constraint(kind="json_schema", value=found["schema"], field=f"{where}.schema")
    return Constraint(kind="json_schema" if made == "json_schema" else "regex", value=found, field=where)


def _guided(read: Reader[Any], kind: Any) -> Reader[Constraint]:
    @reader(**read.schema)
    def found(value: Any, path: str) -> Constraint:
        return Constraint(kind=kind, value=read(value, path), field=path)

    return found


KINDS: Mapping[str, Reader[Constraint]] = {
    "json": _guided(_schema_or_its_text, "json_schema"),
    "regex": _guided(written, "regex"),
    "choice": _guided(_CHOICES, "choice"),
    "grammar": _guided(written, "lark"),
}
GUIDED: Mapping[str, Reader[Constraint]] = {f"guided_{name}": read for name, read in KINDS.items()}
JSON_KINDS = ("json_object", "json_schema")
BACKEND = one_of("auto", "guidance", "llguidance", why="grammars are llguidance's")
WHITESPACE = "the white space of JSON is compact"

_COMPACT = "disable_any_whitespace"  # for JSON; other kinds say themselves what space they have
_BESIDE: Mapping[str, Reader[Any]] = {
    _COMPACT: boolean,
    "disable_fallback": boolean,
    "disable_additional_properties": one_of(False, why='say "additionalProperties": false in the schema'),
}
_REFUSED: Mapping[str, str] = {
    "whitespace_pattern": WHITESPACE,
    "structural_tag": "tools and response_format have the same effect",
}


def _structured_outputs_schema() -> dict[str, Any]:
    """Return one alternative for each kind, in which all other kinds are null."""
    null = {"type": "null"}
    beside = {name: or_null(read.schema) for name, read in _BESIDE.items()} | dict.fromkeys(_REFUSED, null)
    kinds = {name: dict(read.schema) for name, read in KINDS.items()} | {"json_object": {"const": True}}
    unset: dict[str, Any] = dict.fromkeys(kinds, null) | {"json_object": {"enum": [None, False]}}
    return any_of(
        *(
            {
                "type": "object",
                "required": [name],
                "properties": unset | {name: schema} | beside,
                "additionalProperties": False,
            }
            for name, schema in kinds.items()
        )
    )


@reader(**_structured_outputs_schema())
def structured_outputs(value: Any, path: str) -> Constraint:
    """Read vLLM's ``structured_outputs``: an object with one of its kinds."""
    kinds = ", ".join((*KINDS, "json_object"))
    if not isinstance(value, dict):
        raise InvalidField(path, value, f"an object with one of {kinds}")
    found: list[Constraint] = []
    for name, given in value.items():
        where = f"{path}.{name}"
        if name not in KINDS and name != "json_object" and name not in _BESIDE and name not in _REFUSED:
            raise InvalidField(where, given, f"no such field; expected one of {kinds}")
        if given is None:
            continue
        if name in _REFUSED:
            raise InvalidField(where, given, f"null: {_REFUSED[name]}")
        if name in KINDS:
            found.append(KINDS[name](given, where))
        elif name == "json_object":
            found += [Constraint(kind="json_object", field=where)] if boolean(given, where) else []
        else:
            _BESIDE[name](given, where)
    if not found:
        raise InvalidField(path, value, f"an object with one of {kinds}")
    asked = only(found)
    return msgspec.structs.replace(asked, compact=True) if value.get(_COMPACT) and asked.kind in JSON_KINDS else asked


def only(found: list[Constraint]) -> Constraint:
    """Return a request's constraint. Raises ``InvalidField`` for a second one; "text" beside another one is ignored."""
    asked = [each for each in found if each.kind != "text"] or found
    if len(asked) > 1:
        second = asked[1].kind if asked[1].value is None else asked[1].value
        raise InvalidField(asked[1].field, second, f"null: {asked[0].field} says what form the text has")
    return asked[0]
