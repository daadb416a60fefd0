"""JSON schemas of the objects that are sent: typed dictionaries, and structs as msgspec encodes them.

A class becomes a component under its name, with its docstring; ``Annotated[…, Meta(description=…)]`` describes a field.
msgspec's own schemas are not used: they refuse a union of several dictionaries, which most replies have.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from inspect import cleandoc
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from msgspec import Meta, Struct

PLACE = "#/components/schemas/"
Schema = dict[str, Any]
_PLAIN: Mapping[Any, Schema] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bytes: {"type": "string", "format": "binary"},
    type(None): {"type": "null"},
    object: {},
    Any: {},
}


class Components:
    """The schemas of classes by name, which other schemas refer to."""

    def __init__(self) -> None:
        self.schemas: dict[str, Schema] = {}
        self._classes: dict[str, type] = {}

    def schema(self, kind: Any) -> Schema:
        """Return the schema of a type; the classes in it are added to the components.

        Raises ``TypeError`` for a type that has no schema, and for two classes of one name.
        """
        if kind in _PLAIN:
            return dict(_PLAIN[kind])
        if _is_class(kind):
            return self._component(kind)
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Annotated:
            words = [meta.description for meta in arguments[1:] if isinstance(meta, Meta) and meta.description]
            return self.schema(arguments[0]) | ({"description": words[-1]} if words else {})
        if origin is Literal:
            return {"const": arguments[0]} if len(arguments) == 1 else {"enum": list(arguments)}
        if origin in (Union, types.UnionType):
            return self._union([self.schema(one) for one in arguments])
        if origin in (list, tuple, Sequence) and (origin is not tuple or arguments[1:] == (...,)):
            return {"type": "array", "items": self.schema(arguments[0])}
        if origin in (dict, Mapping) and arguments[0] is str:
            return {"type": "object", "additionalProperties": self.schema(arguments[1])}
        raise TypeError(f"{kind} has no JSON schema")

    def _union(self, options: list[Schema]) -> Schema:
        """Return a union; one of a plain type and null is one type, which more generators of clients understand."""
        if all(set(option) == {"type"} for option in options):
            return {"type": [option["type"] for option in options]}
        return {"anyOf": options}

    def _component(self, kind: type) -> Schema:
        name = kind.__name__
        if self._classes.setdefault(name, kind) is not kind:
            raise TypeError(f"{kind.__module__} and {self._classes[name].__module__} both have a class {name}")
        if name not in self.schemas:
            self.schemas[name] = {}  # ends the recursion of a class that has itself as a field
            self.schemas[name] = self._object(kind)
        return {"$ref": PLACE + name}

    def _object(self, kind: type) -> Schema:
        properties: dict[str, Schema] = {}
        required: list[str] = []
        for name, hint in fields(kind).items():
            origin = get_origin(hint)
            if origin is not NotRequired:
                required.append(name)
            properties[name] = self.schema(get_args(hint)[0] if origin in (NotRequired, Required) else hint)
        words = {"description": _plain(kind.__doc__)} if _has_words(kind) else {}
        return {"type": "object", **words, "properties": properties} | ({"required": required} if required else {})


def form(name: str, words: str, fields: Mapping[str, Any]) -> Any:
    """Return a typed dictionary whose fields are known only when the program runs; ``words`` are its docstring."""
    made: Any = TypedDict(name, dict(fields))  # type: ignore[misc]  # its fields are no literals
    made.__doc__ = words
    return made


def sent_form(name: str, words: str, struct: type[Struct], /, **changes: Any) -> Any:
    """Return a typed dictionary with the fields of ``struct``, some of them changed, and more fields behind them."""
    return form(name, words, fields(struct) | changes)


def _is_class(kind: Any) -> bool:
    return isinstance(kind, type) and (hasattr(kind, "__required_keys__") or issubclass(kind, Struct))


def fields(kind: type) -> dict[str, Any]:
    """Return the types of the fields of a typed dictionary or struct, by name."""
    hints = get_type_hints(kind, include_extras=True)
    names = getattr(kind, "__struct_fields__", hints)
    return {name: hints[name] for name in names}


def _has_words(kind: type) -> bool:
    """Return whether a class has a docstring of its own, rather than that of the class that makes dictionaries."""
    return bool(kind.__doc__) and not str(kind.__doc__).startswith("dict(")


def _plain(words: str | None) -> str:
    return re.sub(r"``([^`]*)``", r"`\1`", re.sub(r"\s*\n\s*", " ", cleandoc(words or "")))
