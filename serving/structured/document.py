"""A caller's JSON schema as a document: checks its size, finds its draft and resolves ``$ref``. It fetches nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from ..interface.errors import InvalidField

MAX_CHARS = 1 << 20
MAX_VALUES = 50_000  # objects, lists, strings, numbers …
MAX_DEPTH = 100

DRAFTS = {
    "https://json-schema.org/draft/2020-12/schema": 2020,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "http://json-schema.org/draft-07/schema": 7,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-04/schema": 4,
}
LATEST = 2020

_SCHEMA = {
    *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains"),
    *("propertyNames", "not", "if", "then", "else", "contentSchema"),
}
_SCHEMA_LISTS = {"items", "prefixItems", "allOf", "anyOf", "oneOf"}
_SCHEMA_MAPS = {"properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaNode:
    """A schema and its position in the document.

    ``pointer`` is a JSON pointer from the root, ``base`` the URI of the nearest enclosing ``$id``.
    """

    schema: Any
    pointer: str
    base: str
    synthetic: bool = False  # made by this package: not the caller's statement about the properties of an object

    def child(self, *steps: str | int) -> SchemaNode:
        """Return the node that these steps lead to; ``Document.enter`` applies its own ``$id``."""
        schema = self.schema
        for step in steps:
            schema = schema[step]
        return SchemaNode(schema=schema, pointer=self.pointer + pointer(*steps), base=self.base)


def pointer(*steps: str | int) -> str:
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


class Document:
    """A caller's schema; ``field`` is the request field that contains it.

    Raises ``InvalidField`` if the schema is too large, not JSON or of an unknown draft, or if it has the server's own
    key (``x-guidance``).
    """

    def __init__(self, schema: Any, field: str) -> None:
        self.field = field
        self._check_size(schema)
        if not isinstance(schema, dict | bool):
            raise InvalidField(field, schema, "a JSON schema: an object, or true")
        self.draft = self._draft(schema)
        self._resources: dict[str, SchemaNode] = {}  # by URI
        self._anchors: dict[str, SchemaNode] = {}  # by URI#name
        self._bases: dict[str, str] = {}  # by pointer
        self.root = self.enter(SchemaNode(schema=schema, pointer="", base=""))
        self._resources.setdefault("", self.root)
        self._look_through(self.root)

    def error(self, node: SchemaNode | str, keyword: Any, allowed: str) -> InvalidField:
        """Return the error for a value at a node that is not allowed. Its ``param`` is only the request field."""
        where = node if isinstance(node, str) else node.pointer
        error = InvalidField(f"{self.field}#{where}", keyword, allowed)
        error.param = self.field
        return error

    def enter(self, node: SchemaNode) -> SchemaNode:
        """Return the node with the base URI that results from its own ``$id``."""
        base = self._bases.get(node.pointer)
        if base is None:
            base = node.base
            name = node.schema.get("id" if self.draft == 4 else "$id") if isinstance(node.schema, dict) else None
            if isinstance(name, str) and not name.startswith("#") and not self._hides_siblings(node.schema):
                base = self._joined(node, name)
        return SchemaNode(schema=node.schema, pointer=node.pointer, base=base)

    def resolve(self, node: SchemaNode) -> SchemaNode:
        """Return the node that the ``$ref`` of a node refers to."""
        reference = node.schema["$ref"]
        local = "a reference within the schema (#/$defs/…); others are never fetched"
        if not isinstance(reference, str):
            raise self.error(node.pointer + "/$ref", reference, local)
        uri, fragment = urldefrag(self._joined(node, reference))
        resource = self._resources.get(uri)
        if resource is None:
            raise self.error(node.pointer + "/$ref", reference, local)
        if not fragment or fragment.startswith("/"):
            target = self._walk(resource, unquote(fragment))
        else:
            target = self._anchors.get(f"{uri}#{unquote(fragment)}")
        if target is None or not isinstance(target.schema, dict | bool):
            raise self.error(node.pointer + "/$ref", reference, "a reference to a schema that is there")
        return target

    def _hides_siblings(self, schema: dict[str, Any]) -> bool:
        """Return whether the keywords next to a ``$ref`` are ignored, as up to draft 7."""
        return self.draft <= 7 and "$ref" in schema

    def _joined(self, node: SchemaNode, reference: str) -> str:
        if reference.startswith("#"):
            return urldefrag(node.base).url + reference  # urljoin does not support all URI schemes (urn:)
        try:
            return urljoin(node.base, reference)
        except ValueError:
            raise self.error(node, reference, "a URI") from None

    def _walk(self, resource: SchemaNode, fragment: str) -> SchemaNode | None:
        """Follow a JSON pointer from a resource; return None if it leads nowhere."""
        node = resource
        for step in fragment.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            schema = node.schema
            if isinstance(schema, dict) and key in schema:
                node = node.child(key)
            elif isinstance(schema, list | tuple) and key.isdecimal() and len(key) < 7 and int(key) < len(schema):
                node = node.child(int(key))
            else:
                return None
            if node.pointer in self._bases:
                node = self.enter(node)
        if isinstance(node.schema, dict) and node.pointer not in self._bases:
            self._look_through(node)  # it stands where schemas usually do not ("#/components/…")
        return node

    def _look_through(self, root: SchemaNode) -> None:
        """Record the ``$id`` and anchors of all schemas below; refuse the key of the server's own options."""
        nodes = [root]
        while nodes:
            node = self.enter(nodes.pop())
            if not isinstance(node.schema, dict) or node.pointer in self._bases:
                continue
            self._bases[node.pointer] = node.base
            self._note(node)
            nodes += _below(node)

    def _note(self, node: SchemaNode) -> None:
        schema = node.schema
        if "x-guidance" in schema:
            raise self.error(node, "x-guidance", "a schema without that key: how it is enforced is the server's part")
        own_draft = DRAFTS.get(str(schema.get("$schema", "")).rstrip("#"), self.draft)
        if own_draft != self.draft:
            raise self.error(node, schema["$schema"], "one draft in the whole of a schema")
        base = urldefrag(node.base).url
        if not node.pointer or base not in self._resources:
            self._resources[base] = node
        names = [schema.get("$anchor"), schema.get("$dynamicAnchor")] if self.draft >= 2019 else []
        old_name = schema.get("id" if self.draft == 4 else "$id")
        if self.draft <= 7 and isinstance(old_name, str) and "#" in old_name:
            names.append(old_name.partition("#")[2])
        for name in names:
            if isinstance(name, str):
                self._anchors.setdefault(f"{base}#{name}", node)

    def _draft(self, schema: Any) -> int:
        name = schema.get("$schema") if isinstance(schema, dict) else None
        if name is None:
            return LATEST
        if not isinstance(name, str) or name.rstrip("#") not in DRAFTS:
            raise self.error("/$schema", name, "one of " + ", ".join(DRAFTS))
        return DRAFTS[name.rstrip("#")]

    def _check_size(self, schema: Any) -> None:
        chars = 0
        for count, (depth, value) in enumerate(_values(schema), start=1):
            chars += len(value) + 2 if isinstance(value, str) else 2
            if count > MAX_VALUES or chars > MAX_CHARS or depth > MAX_DEPTH:
                size = f"at most {MAX_VALUES:,} values, {MAX_CHARS:,} characters and {MAX_DEPTH} levels"
                raise InvalidField(self.field, "the schema", size)
            if not _is_json(value):
                raise InvalidField(self.field, value, "a schema of JSON's values")


def _below(node: SchemaNode) -> Iterator[SchemaNode]:
    """Yield the direct subschemas of a schema."""
    for key, value in node.schema.items():
        if key in _SCHEMA_MAPS and isinstance(value, dict):
            yield from (node.child(key, name) for name in value if isinstance(value[name], dict))
        elif key in _SCHEMA_LISTS and isinstance(value, list | tuple):
            yield from (node.child(key, index) for index, entry in enumerate(value) if isinstance(entry, dict))
        elif key in _SCHEMA and isinstance(value, dict):
            yield node.child(key)


def _values(root: Any) -> Iterator[tuple[int, Any]]:
    """Yield all values in a JSON value, including keys, with their depth.

    It does not recurse. It never ends for a value that contains itself, so the caller has to count.
    """
    waiting = [(0, root)]
    while waiting:
        depth, value = waiting.pop()
        yield depth, value
        if isinstance(value, dict):
            waiting += ((depth + 1, entry) for pair in value.items() for entry in pair)
        elif isinstance(value, list | tuple):
            waiting += ((depth + 1, entry) for entry in value)


def _is_json(value: Any) -> bool:
    if isinstance(value, str):
        return is_unicode(value)
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 1 << 1024
    return value is None or isinstance(value, bool | list | tuple)


def is_unicode(text: str) -> bool:
    """Return False for a text with half of a surrogate pair, which cannot be encoded."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
