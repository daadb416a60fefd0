"""The OpenAPI 3.1 document, built from the routes and the dialects' schemas, and the routes that serve it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from mlflow_llm import __version__

from ...dialects import DIALECTS, Dialect, InferenceRoute
from ...dialects.base import JSON, Exchange
from ...frontend.addressing import MAX_STICKY_CHARACTERS, STICKY_HEADER
from ...frontend.answer import Answer, json_answer
from ...frontend.authentication import KEY_HEADER
from ...frontend.invoke import TIMEOUT_HEADER
from ...frontend.operation import Auth, Request, with_body
from ...frontend.worker_state import WorkerState
from ...interface.errors import (
    Conflict,
    DeadlineExceeded,
    InternalError,
    InvalidField,
    LimitExceeded,
    NotFound,
    PayloadTooLarge,
    PermissionDenied,
    PoisonRequest,
    ServingError,
    Unauthenticated,
    Unavailable,
    UnsupportedMediaType,
)
from ...interface.request import Task
from ...interface.type_schema import PLACE, Components
from ..management.endpoints import ONE
from ..route import Route
from .docs_page import POLICY, page
from .plain_enums import plain_enums


def _always(route: Route) -> bool:
    return True


def _is_protected(route: Route) -> bool:
    return not route.auth.is_open


def _has_body(route: Route) -> bool:
    return route.inference is not None or route.body is not None


# Each kind of error: an example, what it means, and the routes that have it.
ERRORS: tuple[tuple[ServingError, str, Callable[[Route], bool]], ...] = (
    (
        InvalidField("temperature", -1, "a number in [0, 2]"),
        "A field is not allowed, or the prompt is too long",
        _always,
    ),
    (Unauthenticated("send an API key"), "No API key, or an unknown one", _is_protected),
    (
        PermissionDenied("the key has no scope 'manage'"),
        "The key may not do this; without keys: a page of another site",
        _always,
    ),
    (NotFound("no endpoint is called 'x'", param="model"), "No such endpoint, adapter or route", _always),
    (
        Conflict("an update is in progress"),
        "It exists already, or an update is in progress",
        lambda route: route.inference is None and route.method != "GET",
    ),
    (PayloadTooLarge("the body is too large"), "The body is too large", _has_body),
    (
        UnsupportedMediaType("Content-Type: 'text/csv' is not allowed; expected application/json"),
        "The Content-Type is not JSON",
        _has_body,
    ),
    (PoisonRequest("engines ended while running this request"), "It ends engines", lambda route: bool(route.inference)),
    (
        LimitExceeded("the limit of 600 queries a minute is used up", limit="qpm", retry_after=12.0),
        "A limit is used up; Retry-After says when to come back",
        _always,
    ),
    (InternalError("the server made a mistake"), "The server's own fault; its log has the details", _always),
    (
        Unavailable("the queue is full", retry_after=1.0),
        "Busy or shutting down; Retry-After says when to come back",
        _always,
    ),
    (
        DeadlineExceeded("the time limit of 1 s passed"),
        "The request's own time limit passed",
        lambda route: bool(route.inference),
    ),
)
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
        Route(
            method="GET",
            path="/openapi.json",
            handler=as_json,
            summary="This document",
            auth=Auth.OPEN,
            reply=dict[str, Any],
        ),
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
            reply=dict[str, Any],
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
    """Return the document: every route with its bodies, replies, errors and examples, and the schemas of them all."""
    paths: dict[str, dict[str, Any]] = {}
    dialects: dict[str, Dialect] = {}
    components = Components()
    for route in routes:
        path = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, components)
        for dialect in (route.dialect, *route.by_header.values()):
            dialects[dialect.name] = dialect
    schemas: dict[str, Any] = {}
    for name, dialect in dialects.items():
        for task, schema in dialect.request_schemas.items():
            schemas |= _with_named_forms(_schema_name(name, task), schema)
    schemas.update({f"{name}_error": dialect.error_schema for name, dialect in dialects.items()})
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "mlflow-llm", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas | components.schemas, "securitySchemes": SECURITY},
        "security": [{}, *({name: []} for name in SECURITY)],
    }
    return made | {part: plain_enums(made[part]) for part in ("paths", "components")}


def _with_named_forms(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema by its name, and each of its forms, if it has several, by a name of its own.

    Generators make a class of each form; without names they lose the classes of what is in them.
    """
    forms = schema.get("anyOf", [])
    if not forms or any(form.get("type") != "object" for form in forms):
        return {name: schema}
    if len(forms) == 1:
        return {name: {key: value for key, value in schema.items() if key != "anyOf"} | forms[0]}
    named = {f"{name}_{number}": form for number, form in enumerate(forms, 1)}
    return {**named, name: {**schema, "anyOf": [{"$ref": f"{PLACE}{one}"} for one in named]}}


def _schema_name(dialect: str, task: Task) -> str:
    return f"{dialect}_{task}_request"


def _operation(route: Route, path: str, components: Components) -> dict[str, Any]:
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
        "responses": responses(route, components),
    }
    if route.inference is not None:
        parameters.append({"name": TIMEOUT_HEADER, "in": "header", "schema": {"type": "number", "exclusiveMinimum": 0}})
        sticky = {"type": "string", "maxLength": MAX_STICKY_CHARACTERS}
        parameters.append({"name": STICKY_HEADER, "in": "header", "schema": sticky})
        body = {"schema": _body(route.dialect, route.inference)} | _examples(route.dialect, route.inference)
        content = dict.fromkeys(filter(None, route.takes), body)
        if JSON in content:  # the schema is that of JSON only; other media types are binary
            content |= {kind: {"schema": BINARY} for kind in content if kind != JSON}
        operation["requestBody"] = {"required": True, "content": content}
    elif route.body is not None:
        shown = {"example": dict(route.example)} if route.example else {}
        takes = (JSON,) if JSON in route.takes else filter(None, route.takes)  # the same body under other names
        content = {kind: {"schema": route.body.schema, **shown} for kind in takes}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _body(dialect: Dialect, route: InferenceRoute) -> dict[str, Any]:
    tasks = dialect.request_schemas if route.task is None else (route.task,)
    refs = [{"$ref": f"#/components/schemas/{_schema_name(dialect.name, task)}"} for task in tasks]
    return refs[0] if len(refs) == 1 else {"oneOf": refs}


def _examples(dialect: Dialect, route: InferenceRoute) -> dict[str, Any]:
    """Return an example of each task, and one of a stream if a field asks for it."""
    found: dict[str, Any] = {}
    for task, exchange in dialect.exchanges(route).items():
        if not exchange.example:
            continue
        found[task] = {"value": dict(exchange.example)}
        if exchange.whole is not None and exchange.event is not None:
            found[f"streamed {task}"] = {"value": {**exchange.example, "stream": True}}
    return {"examples": found} if found else {}


def responses(route: Route, components: Components) -> dict[str, Any]:
    """Return the responses of a route by status: its replies, and its errors with an example of each."""
    content: dict[str, Any] = {kind: {"schema": {"type": "string"}} for kind in route.produces}
    if JSON in content:
        content[JSON] = {"schema": {"type": "object"} if route.reply is None else components.schema(route.reply)}
    description = "The answer"
    if route.inference is not None:
        exchanges = route.dialect.exchanges(route.inference).values()
        content = _contents(route.dialect, exchanges, components)
        description = " ".join(dict.fromkeys(("The answer.", *(one.ends for one in exchanges if one.ends))))
    found: dict[str, Any] = {"200": {"description": description, "content": content}}
    found |= _errors(route)
    for status, text in route.also.items():  # an error may have this status too
        also = {"anyOf": [*(one["schema"] for one in content.values()), _error_schema(route)]}
        found[str(status)] = {"description": text, "content": {JSON: {"schema": also}}}
    return found


def _contents(dialect: Dialect, exchanges: Iterable[Exchange], components: Components) -> dict[str, Any]:
    """Return the schemas of replies by media type; that of a stream is the schema of its events' data."""
    shapes: dict[str, list[Any]] = {}
    for one in exchanges:
        for place, kind in enumerate(one.media if one.whole is not None else ()):
            shapes.setdefault(kind, []).append(BINARY if place else components.schema(one.whole))
        if one.event is not None:
            error = {"$ref": f"{PLACE}{dialect.name}_error"}
            shapes.setdefault(one.stream_media, []).extend((components.schema(one.event), error))
    return {kind: {"schema": _any_of(found)} for kind, found in shapes.items()}


def _any_of(schemas: list[Any]) -> dict[str, Any]:
    options = [option for schema in schemas for option in schema.get("anyOf", [schema])]
    options = [option for place, option in enumerate(options) if option not in options[:place]]
    return options[0] if len(options) == 1 else {"anyOf": options}


def _error_schema(route: Route) -> dict[str, Any]:
    return _any_of([{"$ref": f"{PLACE}{one.name}_error"} for one in (route.dialect, *route.by_header.values())])


def _errors(route: Route) -> dict[str, Any]:
    """Return the errors of a route by status. Each has as its example what the dialect makes of such an error."""
    found: dict[str, Any] = {}
    for error, text, applies in ERRORS:
        if not applies(route):
            continue
        encoded = route.dialect.error(error)
        shown: dict[str, Any] = {"schema": _error_schema(route)}
        if encoded.content_type == JSON:
            shown["example"] = msgspec.json.decode(encoded.body)
        found.setdefault(str(encoded.status), {"description": text, "content": {encoded.content_type: shown}})
    return found
