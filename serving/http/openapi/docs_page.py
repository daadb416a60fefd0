"""An HTML page that shows the OpenAPI document: a template filled from the document, without scripts or external files.

``POLICY`` is its Content-Security-Policy: it allows the one style sheet, by its hash, and nothing else.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jinja2
import markupsafe

Schema = Mapping[str, Any]

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
details{border:1px solid #ccc;border-radius:6px;margin:.4rem 0;padding:.4rem .8rem}
summary{cursor:pointer}code{font-family:ui-monospace,monospace}
b{display:inline-block;min-width:3.7rem}table{border-collapse:collapse;width:100%;margin:.4rem 0}
td{border-top:1px solid #ddd;padding:.25rem .5rem;vertical-align:top;overflow-wrap:anywhere}td:first-child{width:30%}
@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}details,td{border-color:#444}a{color:#8bf}}
"""
POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
Field = tuple[str, bool, str, str]  # name, whether it is required, its type, its description


@functools.cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader(__package__, "templates")
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined).get_template(
        "docs.html.jinja"
    )


def page(document: Schema) -> str:
    """Return an HTML page of all routes of ``document`` by tag: parameters, fields of the body, and responses."""
    by_tag: dict[str, list[dict[str, Any]]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            by_tag.setdefault(operation["tags"][0], []).append(_route(document, method.upper(), path, operation))
    return _template().render(by_tag=by_tag, style=markupsafe.Markup(STYLE))


def _route(document: Schema, method: str, path: str, operation: Schema) -> dict[str, Any]:
    parameters = [
        _field(f"{one['in']}: {one['name']}", bool(one.get("required")), one["schema"])
        for one in operation["parameters"]
    ]
    bodies = []
    if "requestBody" in operation:
        given = [content["schema"] for content in operation["requestBody"]["content"].values()]
        shapes = [shape for schema in given for shape in schema.get("oneOf", [schema])]
        for shape in [shape for index, shape in enumerate(shapes) if shape not in shapes[:index]]:
            name, schema = _deref(document, shape)
            bodies.append({"name": name, "fields": list(_fields(schema, ""))})
    return {
        "method": method,
        "path": path,
        "summary": operation["summary"],
        "parameters": parameters,
        "bodies": bodies,
        "answers": [(status, one["description"]) for status, one in operation["responses"].items()],
    }


def _deref(document: Schema, schema: Schema) -> tuple[str, Schema]:
    """Return the name and the schema of a component; the name is "" for an inline schema."""
    if "$ref" not in schema:
        return "", schema
    name = schema["$ref"].rpartition("/")[2]
    return name, document["components"]["schemas"][name]


def _fields(schema: Schema, path: str) -> Iterator[Field]:
    """Yield each property by its path, including those of nested objects and lists.

    If an object may have several shapes, each property appears once, with the types that any shape accepts. It is
    required only if every shape requires it.
    """
    shapes = list(_shapes(schema))
    objects = [shape for shape in shapes if "properties" in shape]
    required = set.intersection(*(set(shape.get("required", ())) for shape in objects)) if objects else set()
    for name in dict.fromkeys(name for shape in objects for name in shape["properties"]):
        inner = _joined([shape["properties"][name] for shape in objects if name in shape["properties"]])
        where = f"{path}.{name}" if path else name
        yield _field(where, name in required, inner)
        yield from _fields(inner, where)
    items = [shape["items"] for shape in shapes if "items" in shape]
    if items:
        yield from _fields(_joined(items), f"{path}[]")


def _shapes(schema: Schema) -> Iterator[Schema]:
    """Yield ``schema`` and, recursively, each of its alternatives."""
    yield schema
    for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _shapes(option)


def _joined(schemas: list[Schema]) -> Schema:
    """Return one schema for what a field accepts in any of several shapes."""
    different = [schema for index, schema in enumerate(schemas) if schema not in schemas[:index]]
    if len(different) == 1:
        return different[0]
    if all("enum" in schema for schema in different):
        return {**different[0], "enum": list(dict.fromkeys(one for schema in different for one in schema["enum"]))}
    shared = {key: schema[key] for schema in reversed(different) for key in ("description", "default") if key in schema}
    return {**shared, "anyOf": different}


def _field(name: str, required: bool, schema: Schema) -> Field:
    return name, required, _kind(schema), _about(schema)


def _about(schema: Schema) -> str:
    default = f"default {json.dumps(schema['default'])}" if "default" in schema else ""
    return "; ".join(filter(None, (schema.get("description", ""), default)))


def _kind(schema: Schema) -> str:
    """Return the type of a field as text, such as ``integer in [1, 128] | null``."""
    if "enum" in schema:
        return " | ".join(map(json.dumps, schema["enum"]))
    if "const" in schema:
        return json.dumps(schema["const"])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(dict.fromkeys(map(_kind, options)))
    given = schema.get("type", "any")
    kinds = [given] if isinstance(given, str) else list(given)
    return " | ".join(f"{kind}{_bounds(schema, kind)}" for kind in kinds)


def _bounds(schema: Schema, kind: str) -> str:
    if kind == "array" and schema.get("items"):
        return f" of {_kind(schema['items'])}"
    if kind not in ("integer", "number"):
        return ""
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if low is None and high is None:
        return ""
    left = "(" if low is None or "exclusiveMinimum" in schema else "["
    right = ")" if high is None else "]"
    return f" in {left}{'−∞' if low is None else low}, {'∞' if high is None else high}{right}"
