"""The Flask application of a worker: each route bound to its handler, behind the checks for every request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from flask import Flask, Response, current_app
from flask import request as flask_request
from flask.globals import request_ctx
from werkzeug import exceptions as werkzeug
from werkzeug.exceptions import HTTPException

from ..dialects import Dialect, dialect_of
from ..frontend.answer import Answer, error_answer
from ..frontend.authentication import authenticate, charge
from ..frontend.dialect_choice import default_dialect
from ..frontend.operation import Request, ResponseDialect
from ..frontend.streams.in_flight import ClientGone
from ..frontend.worker_state import WorkerState
from ..interface.errors import (
    Aborted,
    InternalError,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    RequestError,
    ServingError,
)
from ..observability.access_record import REQUEST_ID, AccessRecord, request_id_from
from ..observability.tracing import OFF, Tracer
from ..system import logs
from .route import Listener, Route
from .routes import ROUTES, one_slash
from .wire import cors
from .wire.bodies import is_large, read_body
from .wire.csrf import check_content_type, check_cross_site
from .wire.keep_alive import address_in, came_to_probes, settle


class App(Flask):
    """Flask that treats repeated slashes in a path as one, where Flask itself would redirect with an HTML page."""

    def wsgi_app(self, environ: Any, start_response: Any) -> Any:
        environ["PATH_INFO"] = one_slash(environ.get("PATH_INFO", ""))
        return super().wsgi_app(environ, start_response)


def create_app(server: WorkerState, routes: tuple[Route, ...] = ROUTES) -> Flask:
    """Make the WSGI application of one worker."""
    app = App("mlflow_llm", static_folder=None)
    app.extensions["mlflow_llm"] = server
    app.config["MAX_CONTENT_LENGTH"] = server.settings.max_body_bytes
    app.url_map.strict_slashes = False
    for route in routes:
        app.add_url_rule(
            route.path,
            endpoint=f"{route.method} {route.path}".replace(".", "_"),  # Flask takes a dot as a blueprint's separator
            view_func=_view(server, route),
            methods=[route.method],
            provide_automatic_options=False,
        )
    app.register_error_handler(HTTPException, _unrouted)
    app.before_request(partial(_preflight, server.settings.cors_origins))
    if server.settings.cors_origins:
        app.after_request(partial(_shared, server.settings.cors_origins))
    app.after_request(_settled)
    return app


def _preflight(origins: tuple[str, ...]) -> Response | None:
    """Answer a browser that asks whether a page may send a request; None for all other requests."""
    if flask_request.method != "OPTIONS":
        return None
    headers: Any = flask_request.headers
    adapter = request_ctx.url_adapter
    if not cors.is_preflight(flask_request.method, headers) or adapter is None:
        return None
    methods = list(adapter.allowed_methods())
    if not methods:
        return None  # no such path
    record, dialect = _access_record(), dialect_of(flask_request.path)
    try:
        answer = cors.preflight(origins, headers, methods)
    except ServingError as error:
        answer = error_answer(dialect, error)
        record.finish(answer.status, error.logged)
    return _response(answer, dialect, record.request_id)


def _shared(origins: tuple[str, ...], response: Response) -> Response:
    """Let pages of ``origins`` see the answer."""
    response.headers.extend(cors.headers_for(origins, flask_request.headers.get("Origin")))
    return response


def _settled(response: Response) -> Response:
    settle(flask_request.environ)
    return response


def _view(server: WorkerState, route: Route) -> Callable[..., Response]:
    def view(**path: str) -> Response:
        record = _access_record(server.tracer)
        spoken = route.spoken(flask_request.headers)
        answer = _answer(server, route, path, record, spoken)
        # a stream finishes its own record; for probes and pages that are open to all, nothing is recorded
        if isinstance(answer.body, bytes) if route.inference is not None else not route.auth.is_open:
            record.finish(answer.status)
        return _response(answer, spoken.dialect or route.dialect, record.request_id)

    return view


def _answer(
    server: WorkerState, route: Route, path: dict[str, str], record: AccessRecord, spoken: ResponseDialect
) -> Answer:
    environ, charged = flask_request.environ, False
    address = address_in(environ)
    try:
        listens = _check_listener(server, route, probes=came_to_probes(environ))
        if not server.requires_key:
            check_cross_site(environ, listens, server.settings.allowed_hosts, server.settings.cors_origins)
        charged = not route.auth.is_open  # not before: another site's page must not use up a user's refusals
        headers = flask_request.headers
        caller = authenticate(server, route.auth, headers, address, record)
        check_content_type(environ, route.takes)
        request = Request(
            operation=route,
            record=record,
            caller=caller,
            headers=headers,
            path=path,
            parameters=lambda: flask_request.args.to_dict(flat=False),
            receive=partial(read_body, environ, server.settings.max_body_bytes),
            is_large=is_large(environ, server.settings.offload_bytes),
            address=address,
            sock=environ.get("gunicorn.socket"),
            spoken=spoken,
        )
        return route.handler(server, request)
    except ServingError as error:
        if charged:
            charge(server, error, record, address)
        answer = error_answer(spoken.dialect or default_dialect(server.endpoints, route), error)
        record.finish(answer.status, error.logged)
        return replace(answer, headers=record.headers | answer.headers)
    except ClientGone:
        record.finish(Aborted.status, "the client went away")
        return Answer(status=Aborted.status)
    except HTTPException:
        raise
    except Exception:
        logs.event("fault", level=logging.ERROR, exc_info=True, request_id=record.request_id)
        record.finish(InternalError.status, "internal error")
        shown = InternalError(f"internal error; the log has it under {record.request_id}")
        answer = error_answer(spoken.dialect or route.dialect, shown)
        return replace(answer, headers=record.headers | answer.headers)


def _check_listener(server: WorkerState, route: Route, *, probes: bool) -> str:
    """Return the address of the listener to which the request came.

    Raises ``NotFound`` for a route that this listener does not have.
    """
    settings = server.settings
    if probes and route.listener is Listener.GATEWAY:
        raise NotFound(f"no route {flask_request.path[:100]} here: this listener is for probes and metrics")
    if not probes and route.listener is Listener.PROBES and settings.probe_port is not None:
        raise NotFound("no metrics here: this server has a listener of its own for them (probe_port)")
    if settings.socket is not None and not probes:
        return ""  # a Unix socket, which no browser can reach
    return (settings.probe_host if probes else None) or settings.host


def _access_record(tracer: Tracer = OFF) -> AccessRecord:
    request = request_ctx.request  # each access by ``flask_request`` would find it anew
    headers = request.headers
    return AccessRecord(
        request_id=request_id_from(headers.get(REQUEST_ID)),
        method=request.method,
        path=request.path,
        trace=tracer.context(headers.get("traceparent"), headers.get("tracestate")),
        tracer=tracer,
    )


def _unrouted(error: HTTPException) -> Response:
    """Answer an error of the framework in the dialect of the path, without showing internals."""
    refused = _refusal(error)
    dialect = dialect_of(flask_request.path)
    answer = error_answer(dialect, refused)
    record = _access_record()
    if isinstance(refused, MethodNotAllowed) and (allowed := getattr(error, "valid_methods", None)):
        answer.headers["Allow"] = ", ".join(sorted(allowed))
    record.finish(answer.status, refused.logged)
    return _response(answer, dialect, record.request_id)


def _refusal(error: HTTPException) -> ServingError:
    if isinstance(error, werkzeug.NotFound):
        return NotFound(f"no route {flask_request.path[:100]}; {_near_route(flask_request.path)}")
    if isinstance(error, werkzeug.MethodNotAllowed):
        return MethodNotAllowed(f"{flask_request.method[:20]} is not allowed on {flask_request.path[:100]}")
    if isinstance(error, werkzeug.RequestEntityTooLarge):
        return PayloadTooLarge("the body is larger than this server allows")
    if error.code is not None and error.code < InternalError.status:
        return RequestError(f"{error.name}: the request could not be read")
    return InternalError("internal error")


def _near_route(path: str) -> str:
    """Return what to change about a path that is a route's but for the /v1 of the base URL; else where routes are."""
    bare = path[:200].rstrip("/")
    for found in (f"/v1{bare}", bare.replace("/v1/v1/", "/v1/", 1)):
        if found != bare and found in _paths():
            return (
                f"there is {found}: the base URL for OpenAI's clients is this server's with /v1 at its end, for "
                "Anthropic's without"
            )
    return "/openapi.json lists them"


def _paths() -> set[str]:
    return {rule.rule for rule in current_app.url_map.iter_rules()}


def _response(answer: Answer, dialect: Dialect, request_id: str) -> Response:
    own = {REQUEST_ID: request_id, "X-Content-Type-Options": "nosniff"}
    if dialect.request_id_header is not None:
        own[dialect.request_id_header] = request_id
    return Response(
        answer.body,
        status=answer.status,
        content_type=answer.content_type,
        headers={**answer.headers, **own},
        direct_passthrough=True,
    )
