"""The OpenAPI 3.1 document, made from the table of routes and the tables of request fields."""

from __future__ import annotations

import functools
import re
from typing import Any

from mlflow_llm import __version__

from ..dialects import DIALECTS, InferenceRoute
from ..request import Task
from .invoke import STICKY_HEADER, STICKY_MAX, TIMEOUT_HEADER
from .routes import ROUTES, Route

ERRORS = {
    "400": "A field is not allowed, or the prompt is too long",
    "401": "No API key, or an unknown one",
    "403": "The key may not do this; without keys: a page of another site",
    "404": "No such endpoint, adapter or route",
    "409": "It exists already, or an update is in progress",
    "413": "The body is too large",
    "415": "The body is not said to be JSON (Content-Type)",
    "429": "A limit is used up; Retry-After says when to come back",
    "503": "Busy or shutting down; Retry-After says when to come back",
    "504": "The request's own time limit passed",
}
CONTENT = {"metrics": "text/plain", "ping": "text/plain", "version": "text/plain", "docs": "text/html"}
CONTENT["get_serving_metrics"] = "text/plain"
EXPORTS = {"usage": ("text/csv", "application/vnd.apache.parquet")}  # beside JSON


@functools.cache
def document() -> dict[str, Any]:
    """Every route, its request fields and its errors."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        path = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", route.path)
        for method in route.methods:
            paths.setdefault(path, {})[method.lower()] = _operation(route, method.lower(), path)
    schemas: dict[str, Any] = {
        _schema_name(name, task): schema
        for name, dialect in DIALECTS.items()
        for task, schema in dialect.request_schemas.items()
    }
    schemas.update({f"{name}_error": dialect.error_schema for name, dialect in DIALECTS.items()})
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlflow-llm", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _schema_name(dialect: str, task: Task) -> str:
    return f"{dialect}_{task}_request"


def _operation(route: Route, method: str, path: str) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()]
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_"),
        "summary": route.summary,
        "tags": [route.dialect],
        "parameters": parameters,
        "responses": _responses(route),
    }
    if route.inference is not None:
        parameters.append({"name": TIMEOUT_HEADER, "in": "header", "schema": {"type": "number", "exclusiveMinimum": 0}})
        sticky = {"type": "string", "maxLength": STICKY_MAX}
        parameters.append({"name": STICKY_HEADER, "in": "header", "schema": sticky})
        content = {kind: {"schema": _body(route.dialect, route.inference)} for kind in route.content_types}
        operation["requestBody"] = {"required": True, "content": content}
    elif route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": route.body.schema}}}
    return operation


def _body(dialect: str, route: InferenceRoute) -> dict[str, Any]:
    tasks = DIALECTS[dialect].request_schemas if route.task is None else (route.task,)
    refs = [{"$ref": f"#/components/schemas/{_schema_name(dialect, task)}"} for task in tasks]
    return refs[0] if len(refs) == 1 else {"oneOf": refs}


def _responses(route: Route) -> dict[str, Any]:
    kind = CONTENT.get(route.handler, "application/json")
    content: dict[str, Any] = {
        kind: {"schema": {"type": "object"} if kind == "application/json" else {"type": "string"}}
    }
    content |= {export: {"schema": {"type": "string"}} for export in EXPORTS.get(route.handler, ())}
    if route.is_invocation:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{route.dialect}_error"}}}
    found: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    for status, text in ERRORS.items():
        found[status] = {"description": text, "content": error}
    if route.handler in ("health", "ready"):
        found["503"] = {"description": "An engine makes no progress", "content": content}
    return found
