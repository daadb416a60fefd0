"""Write the types of the page, ``serving/http/page/source/api_types.ts``, from the server's OpenAPI document.

python tests/serving/http/page/write_api_types.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mlflow_llm.serving.http.openapi.document import document
from mlflow_llm.serving.http.page.bundle_routes import BUNDLE
from mlflow_llm.serving.http.routes import ROUTES
from mlflow_llm.serving.interface.type_schema import PLACE

Schema = Mapping[str, Any]
PATH = BUNDLE.parent / "source" / "api_types.ts"
HEAD = "/** Made of /openapi.json by tests/serving/http/page/write_api_types.py; do not edit. */\n"
PLAIN = {"string": "string", "boolean": "boolean", "integer": "number", "number": "number", "null": "null"}
USED = (  # the routes whose replies the page reads
    "GET /api/2.0/account",
    "GET /api/2.0/audit",
    "GET /api/2.0/endpoints/",
    "GET /api/2.0/keys",
    "POST /api/2.0/keys",
    "GET /api/2.0/limits",
    "PUT /api/2.0/limits",
    "GET /api/2.0/prices",
    "PUT /api/2.0/prices",
    "GET /api/2.0/prompts",
    "GET /api/2.0/prompts/{name}",
    "GET /api/2.0/requests",
    "GET /api/2.0/serving-endpoints",
    "GET /api/2.0/serving-endpoints/{name}/payloads",
    "GET /api/2.0/serving-endpoints/{name}/served-models/{served}/build-logs",
    "GET /api/2.0/usage",
    "GET /health",
    "GET /v1/batches",
    "POST /v1/batches",
    "GET /v1/files",
    "POST /v1/files",
    "GET /v1/models",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/embeddings",
)


def types(whole: Schema) -> str:
    """Return TypeScript with an interface for each component that a reply of ``USED`` has, and the replies by route."""
    components = whole["components"]["schemas"]
    replies = {route: _replies(whole, route) for route in USED}
    needed = sorted({name for schemas in replies.values() for schema in schemas for name in _names(schema, components)})
    lines = [HEAD, "export interface Replies {"]
    lines += [f"  {json.dumps(route)}: {_union(schemas)};" for route, schemas in replies.items()]
    lines.append("}")
    for name in needed:
        lines += ["", *_interface(name, components[name])]
    return "\n".join(lines) + "\n"


def _replies(whole: Schema, route: str) -> list[Schema]:
    """Return the schemas of a route's JSON reply and of the events of its stream, errors apart."""
    method, path = route.split()
    content = whole["paths"][path][method.lower()]["responses"]["200"]["content"]
    given = [content[kind]["schema"] for kind in ("application/json", "text/event-stream") if kind in content]
    shapes = [shape for schema in given for shape in schema.get("anyOf", [schema])]
    return [shape for shape in shapes if not shape.get("$ref", "").endswith("_error")]


def _names(schema: Any, components: Schema) -> set[str]:
    found: set[str] = set()
    waiting = [schema]
    while waiting:
        for name in _referred(waiting.pop()):
            if name not in found:
                found.add(name)
                waiting.append(components[name])
    return found


def _referred(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from _referred(one)
    elif isinstance(value, Mapping):
        for name, one in value.items():
            if name == "$ref" and isinstance(one, str):
                yield one.removeprefix(PLACE)
            else:
                yield from _referred(one)


def _interface(name: str, schema: Schema) -> Iterator[str]:
    if "properties" not in schema:
        yield f"export type {name} = {_type(schema)};"
        return
    if words := schema.get("description"):
        yield f"/** {words} */"
    yield f"export interface {name} {{"
    required = schema.get("required", ())
    for field, inner in schema["properties"].items():
        if words := inner.get("description"):
            yield f"  /** {words} */"
        yield f"  {field}{'' if field in required else '?'}: {_type(inner)};"
    yield "}"


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(PLACE)
    if "enum" in schema or "const" in schema:
        return " | ".join(json.dumps(one) for one in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema or "oneOf" in schema:
        return _union(schema.get("anyOf") or schema["oneOf"])
    kinds = schema.get("type", ())
    if not kinds:
        return "unknown"
    return " | ".join(_of_kind(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _of_kind(kind: str, schema: Schema) -> str:
    if kind == "array":
        inner = _type(schema.get("items", {}))
        return f"({inner})[]" if " " in inner else f"{inner}[]"
    if kind == "object":
        return f"Record<string, {_type(schema.get('additionalProperties') or {})}>"
    return PLAIN[kind]


def _union(schemas: list[Schema]) -> str:
    return " | ".join(dict.fromkeys(_type(one) for one in schemas))


def written() -> str:
    """Return what ``api_types.ts`` has to have."""
    return types(document(ROUTES))


if __name__ == "__main__":
    PATH.write_text(written(), encoding="utf-8")
