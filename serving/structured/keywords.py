"""The keywords of JSON Schema: the type each applies to, the drafts that have it, and the valid form of its value."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from .document import Document, SchemaNode

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

OF_TYPE = {
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"),
        *("unevaluatedItems", "minContains", "maxContains"),
    },
    "object": {
        *("properties", "patternProperties", "additionalProperties", "propertyNames", "required", "minProperties"),
        *("maxProperties", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    },
}
_SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    "if": 7,
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems"), 2019),
    **dict.fromkeys(("minContains", "maxContains", "$recursiveRef"), 2019),
    **dict.fromkeys(("prefixItems", "$dynamicRef"), 2020),
}
_UNTIL = {"$recursiveRef": 2019}


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and value >= 0 and value == int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(_is_schema, value))


def _are_named_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _are_texts(value: Any) -> Any:
    return isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value)


def _are_types(value: Any) -> Any:
    return value in TYPES if isinstance(value, str) else value and _are_texts(value) and {*value} <= {*TYPES}


_Shape = tuple[Callable[[Any], Any], str]
_COUNT: _Shape = (_is_count, "a whole number from 0")
_NUMBER: _Shape = (_is_number, "a number")
_SCHEMA: _Shape = (_is_schema, "a schema")
_SCHEMAS: _Shape = (_are_schemas, "a list of schemas, not empty")
_NAMED: _Shape = (_are_named_schemas, "an object of schemas")
_TEXT: _Shape = (lambda value: isinstance(value, str), "a text")
_BOUND: _Shape = (lambda value: _is_number(value) or isinstance(value, bool), "a number")

SHAPES: dict[str, _Shape] = {
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _BOUND),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties", "propertyNames", "additionalItems"), _SCHEMA),
    **dict.fromkeys(("not", "contains", "unevaluatedItems"), _SCHEMA),
    "items": (lambda value: _is_schema(value) or value == [] or _are_schemas(value), "a schema"),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), _NAMED),
    **dict.fromkeys(("pattern", "format"), _TEXT),
    "required": (_are_texts, "a list of names"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    "enum": (lambda value: isinstance(value, list | tuple) and len(value) > 0, "a list of values, not empty"),
    "type": (
        _are_types,
        "a type or a list of types: " + ", ".join(TYPES),
    ),
    "dependentRequired": (
        lambda value: isinstance(value, dict) and all(map(_are_texts, value.values())),
        "lists of names",
    ),
    "dependencies": (
        lambda value: isinstance(value, dict) and all(_is_schema(each) or _are_texts(each) for each in value.values()),
        "schemas and lists of names",
    ),
}  # fmt: skip


class Keywords:
    """A reader of the keywords of nodes, according to the document's draft. Raises ``InvalidField`` for an invalid
    value."""

    def __init__(self, document: Document) -> None:
        self.document = document
        draft = document.draft
        later = {name for name, since in _SINCE.items() if draft < since}
        self._unknown = later | {name for name, until in _UNTIL.items() if draft > until}
        self._sound: set[tuple[int, str]] = set()  # (identity of a value, keyword) whose form has been checked

    def has(self, node: SchemaNode, keyword: str) -> bool:
        return keyword in node.schema and keyword not in self._unknown

    def get(self, node: SchemaNode, keyword: str) -> Any:
        """Return the keyword's value, or None if it is absent; null is not a valid value of any keyword."""
        if not self.has(node, keyword):
            return None
        value = node.schema[keyword]
        if keyword in SHAPES and (id(value), keyword) not in self._sound:
            fits, allowed = SHAPES[keyword]
            if not fits(value):
                raise self.document.error(f"{node.pointer}/{keyword}", value, allowed)
            if isinstance(value, dict | list | tuple):
                self._sound.add((id(value), keyword))  # the document keeps the value alive, so its id stays unique
        return value

    def any_of(self, node: SchemaNode, keywords: Set[str]) -> bool:
        return not keywords.isdisjoint(node.schema) and any(
            self.has(node, each) for each in keywords & node.schema.keys()
        )

    def unsupported(self, node: SchemaNode, keyword: str, instead: str = "") -> Exception:
        return self.document.error(node, keyword, f"a schema without this keyword{instead and '; '}{instead}")
