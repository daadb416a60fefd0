"""The OpenAPI 3.1 document, built from the routes and the dialects' schemas, and the routes that serve it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

from mlflow_llm import __version__

from ...dialects import DIALECTS, Dialect, InferenceRoute
from ...dialects.base import JSON
from ...frontend.addressing import STICKY_HEADER, STICKY_MAX
from ...frontend.answer import Answer, json_answer
from ...frontend.authentication import KEY_HEADER
from ...frontend.invoke import TIMEOUT_HEADER
from ...frontend.operation import Auth, Request, with_body
from ...frontend.worker_state import WorkerState
from ...interface.errors import (
    Conflict,
    DeadlineExceeded,
    LimitExceeded,
    NotFound,
    PayloadTooLarge,
    PermissionDenied,
    RequestError,
    ServingError,
    Unauthenticated,
    Unavailable,
    UnsupportedMediaType,
)
from ...interface.request import Task
from ..management.endpoints import ONE
from ..route import Route
from .docs_page import POLICY, page

ERRORS: dict[type[ServingError], str] = {
    RequestError: "A field is not allowed, or the prompt is too long",
    Unauthenticated: "No API key, or an unknown one",
    PermissionDenied: "The key may not do this; without keys: a page of another site",
    NotFound: "No such endpoint, adapter or route",
    Conflict: "It exists already, or an update is in progress",
    PayloadTooLarge: "The body is too large",
    UnsupportedMediaType: "The Content-Type is not JSON",
    LimitExceeded: "A limit is used up; Retry-After says when to come back",
    Unavailable: "Busy or shutting down; Retry-After says when to come back",
    DeadlineExceeded: "The request's own time limit passed",
}
BINARY = {"type": "string", "format": "binary"}
SECURITY: dict[str, dict[str, str]] = {
    "key": {"type": "http", "scheme": "bearer"},
    "key_header": {"type": "apiKey", "in": "header", "name": KEY_HEADER},
}


def documented(routes: tuple[Route, ...]) -> tuple[Route, ...]:
    """Return ``routes`` plus the routes that serve the document of all these routes."""

    @functools.cache
    def whole() -> dict[str, Any]:
        return document(everything)

    def as_json(server: WorkerState, request: Request) -> Answer:
        return json_answer(whole())

    def as_page(server: WorkerState, request: Request) -> Answer:
        body, headers = page(whole()).encode(), {"Content-Security-Policy": POLICY}
        return Answer(body=body, content_type="text/html; charset=utf-8", headers=headers)

    def of_endpoint(server: WorkerState, request: Request) -> Answer:
        server.managed_endpoints().get(request.name, request.caller)
        return json_answer(_of_endpoint(whole(), request.name))

    everything = (
        *routes,
        Route(method="GET", path="/openapi.json", handler=as_json, summary="This document", auth=Auth.OPEN),
        Route(
            method="GET",
            path="/docs",
            handler=as_page,
            summary="Documentation page",
            auth=Auth.OPEN,
            produces=("text/html",),
        ),
        Route(
            method="GET",
            path=f"{ONE}/openapi",
            handler=with_body(of_endpoint),
            summary="The OpenAPI document of one endpoint",
            dialect=DIALECTS["databricks"],
        ),
    )
    return everything


def _of_endpoint(whole: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the part of ``whole`` that is about the endpoint ``name``."""
    path = "/serving-endpoints/{name}/invocations"
    operation = dict(whole["paths"][path]["post"])
    operation["parameters"] = [p for p in operation["parameters"] if p["in"] != "path"]
    return whole | {"paths": {path.format(name=name): {"post": operation}}}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the document: every route with its request fields and errors, and the schemas of the routes' dialects."""
    paths: dict[str, dict[str, Any]] = {}
    dialects: dict[str, Dialect] = {}
    for route in routes:
        path = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path)
        dialects[route.dialect.name] = route.dialect
    schemas: dict[str, Any] = {
        _schema_name(name, task): schema
        for name, dialect in dialects.items()
        for task, schema in dialect.request_schemas.items()
    }
    schemas.update({f"{name}_error": dialect.error_schema for name, dialect in dialects.items()})
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlflow-llm", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": SECURITY},
        "security": [{}, *({name: []} for name in SECURITY)],
    }


def _schema_name(dialect: str, task: Task) -> str:
    return f"{dialect}_{task}_request"


def _operation(route: Route, path: str) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()]
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{path}").strip("_"),
        "summary": route.summary,
        "tags": [route.dialect.name],
        "parameters": parameters,
        "responses": _responses(route),
    }
    if route.inference is not None:
        parameters.append({"name": TIMEOUT_HEADER, "in": "header", "schema": {"type": "number", "exclusiveMinimum": 0}})
        sticky = {"type": "string", "maxLength": STICKY_MAX}
        parameters.append({"name": STICKY_HEADER, "in": "header", "schema": sticky})
        content = {kind: {"schema": _body(route.dialect, route.inference)} for kind in filter(None, route.takes)}
        if JSON in content:  # the schema is that of JSON only; other media types are binary
            content |= {kind: {"schema": BINARY} for kind in content if kind != JSON}
        operation["requestBody"] = {"required": True, "content": content}
    elif route.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": route.body.schema}}}
    return operation


def _body(dialect: Dialect, route: InferenceRoute) -> dict[str, Any]:
    tasks = dialect.request_schemas if route.task is None else (route.task,)
    refs = [{"$ref": f"#/components/schemas/{_schema_name(dialect.name, task)}"} for task in tasks]
    return refs[0] if len(refs) == 1 else {"oneOf": refs}


def _responses(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {kind: {"schema": {"type": "string"}} for kind in route.produces}
    if JSON in content:
        content[JSON] = {"schema": {"type": "object"}}
    if route.inference is not None:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {JSON: {"schema": {"$ref": f"#/components/schemas/{route.dialect.name}_error"}}}
    found: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    found |= {str(cls.status): {"description": text, "content": error} for cls, text in ERRORS.items()}
    found |= {str(status): {"description": text, "content": content} for status, text in route.also.items()}
    return found
