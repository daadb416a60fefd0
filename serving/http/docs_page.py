"""A page to read the OpenAPI document with: made of the document itself, no script, nothing loaded from elsewhere.

``POLICY`` is its Content-Security-Policy: the one style, by its hash, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

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
HEAD = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>mlflow-llm</title>
<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>
<body><h1>mlflow-llm</h1>
<p>The machine-readable document is <a href="openapi.json">openapi.json</a>; * marks what must be given.</p>
"""


def page(document: Schema) -> str:
    """Every route of ``document`` by its tag: parameters, the fields of its body, and what it may answer."""
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            by_tag.setdefault(operation["tags"][0], []).append(_route(document, method.upper(), path, operation))
    return HEAD + "".join(f"<h2>{tag}</h2>\n{''.join(routes)}" for tag, routes in by_tag.items()) + "</body></html>\n"


def _route(document: Schema, method: str, path: str, operation: Schema) -> str:
    told = [f"<summary><b>{method}</b><code>{escape(path)}</code> {escape(operation['summary'])}</summary>"]
    parameters = [
        (f"{one['in']}: {one['name']}", bool(one.get("required")), one["schema"]) for one in operation["parameters"]
    ]
    if parameters:
        told.append(_table(_field(*one) for one in parameters))
    if "requestBody" in operation:
        (content,) = operation["requestBody"]["content"].values()
        for given in content["schema"].get("oneOf", [content["schema"]]):
            name, schema = _deref(document, given)
            told.append(f"<p>Body{f': {name}' if name else ''}</p>" + _table(_fields(schema, "")))
    answers = ((f"<code>{status}</code>", escape(one["description"])) for status, one in operation["responses"].items())
    return f"<details>{''.join(told)}<p>Answers</p>{_table(answers)}</details>\n"


def _deref(document: Schema, schema: Schema) -> tuple[str, Schema]:
    """The name of a component and what it is; "" for a schema that is written in place."""
    if "$ref" not in schema:
        return "", schema
    name = schema["$ref"].rpartition("/")[2]
    return name, document["components"]["schemas"][name]


def _fields(schema: Schema, path: str) -> Iterator[tuple[str, ...]]:
    """Each property, and those of the objects and lists within, by their paths. Of several shapes that an object may
    have, all properties once, with what any of them takes; what one of them does without need not be given."""
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
    """``schema`` without its alternatives, and they without theirs."""
    yield schema
    for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _shapes(option)


def _joined(schemas: list[Schema]) -> Schema:
    """One schema for what a field takes in any of several shapes."""
    different = [schema for place, schema in enumerate(schemas) if schema not in schemas[:place]]
    if len(different) == 1:
        return different[0]
    if all("enum" in schema for schema in different):
        return {**different[0], "enum": list(dict.fromkeys(one for schema in different for one in schema["enum"]))}
    told = {key: schema[key] for schema in reversed(different) for key in ("description", "default") if key in schema}
    return {**told, "anyOf": different}


def _field(name: str, required: bool, schema: Schema) -> tuple[str, ...]:
    return f"<code>{escape(name)}</code>{' *' if required else ''}", escape(_kind(schema)), escape(_about(schema))


def _about(schema: Schema) -> str:
    default = f"default {json.dumps(schema['default'])}" if "default" in schema else ""
    return "; ".join(filter(None, (schema.get("description", ""), default)))


def _kind(schema: Schema) -> str:
    """``integer in [1, 128] | null``."""
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


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    return "<table>" + "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows) + "</table>"
