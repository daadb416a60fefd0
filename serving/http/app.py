"""The Flask application: the table of routes bound to what answers them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from flask import Flask, Response, request
from werkzeug import exceptions as werkzeug
from werkzeug.exceptions import HTTPException

from .. import logs
from ..control.settings import ServerSettings
from ..dialects import DIALECTS, Head, dialect_of
from ..errors import (
    Aborted,
    InternalError,
    LimitExceeded,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    RequestError,
    ServingError,
    Unauthenticated,
)
from ..metering.authorization import ANONYMOUS, UNKNOWN, Caller
from ..observability.access_record import REQUEST_ID, AccessRecord, request_id_from
from ..observability.tracing import OFF, Tracer
from ..routing.load_shedding import LoadShedder
from ..routing.served_endpoints import ServedEndpoints
from ..tasks.cache_salt import CacheSalts
from . import usage
from .accounts import ANSWERS as ACCOUNTS
from .answer import Answer, error_answer
from .bodies import is_large, read_body
from .csrf import check_content_type, check_cross_site
from .engine_logs import ANSWERS as ENGINE_LOGS
from .in_flight import ClientGone, InFlightRequests
from .invoke import STICKY_HEADER, TIMEOUT_HEADER, Incoming, Server, invoke
from .keep_alive import address_in, came_to_probes, settle
from .management import ANSWERS as MANAGEMENT
from .management import Asked
from .memory_budget import MemoryBudget
from .offload import Offload
from .pages import PAGES
from .refusal_limit import RefusalLimit
from .routes import ROUTES, Route, one_slash

TELLS_MORE = ("health", "ready", "metrics")  # of what is open: to who shows a key
PROBES = ("ping", "health", "ready", "metrics")
ANSWERS = {**MANAGEMENT, **ACCOUNTS, **ENGINE_LOGS, "usage": usage.answer}


def make_server(
    endpoints: ServedEndpoints,
    settings: ServerSettings | None = None,
    *,
    keys: Any = None,
    ledger: Any = None,
    cache_secret: bytes | None = None,
) -> Server:
    """What one worker shares. ``keys`` (``metering.keys.Keys``) None: nobody is asked for a key. ``cache_secret``
    (``CacheSalts``) is the same in all workers."""
    settings = settings or ServerSettings()
    return Server(
        settings=settings,
        endpoints=endpoints,
        load_shedder=LoadShedder(
            max_queued=settings.max_queued, retry_after=settings.retry_after, workers=settings.workers
        ),
        in_flight=InFlightRequests(),
        offload=Offload(settings.offload_bytes),
        salts=CacheSalts(cache_secret),
        memory=MemoryBudget(
            total=max(settings.max_held_bytes, settings.max_body_bytes),
            by_caller=max(settings.max_caller_bytes, settings.max_body_bytes),
        ),
        refusals=RefusalLimit(settings.refusals_per_minute),
        keys=keys,
        ledger=ledger,
    )


class App(Flask):
    """Flask that takes a path with repeated slashes as the one meant, where it would redirect, in HTML, to it."""

    def wsgi_app(self, environ: Any, start_response: Any) -> Any:
        environ["PATH_INFO"] = one_slash(environ.get("PATH_INFO", ""))
        return super().wsgi_app(environ, start_response)


def create_app(server: Server) -> Flask:
    """The WSGI application of one worker."""
    app = App("mlflow_llm", static_folder=None)
    app.extensions["mlflow_llm"] = server
    app.config["MAX_CONTENT_LENGTH"] = server.settings.max_body_bytes
    app.url_map.strict_slashes = False
    for number, route in enumerate(ROUTES):
        app.add_url_rule(
            route.path,
            endpoint=f"{number}-{route.handler}",
            view_func=_view(server, route),
            methods=list(route.methods),
            provide_automatic_options=False,
        )
    app.register_error_handler(HTTPException, _unrouted)
    app.after_request(_settled)
    return app


def _settled(response: Response) -> Response:
    settle(request.environ)
    return response


def _view(server: Server, route: Route) -> Callable[..., Response]:
    def view(name: str | None = None, **parts: str) -> Response:
        record = _access_record(server.tracer)
        answer = _answer(server, route, name, parts, record)
        # a stream says itself when it has ended; of probes and pages that are open to all nothing is kept
        if isinstance(answer.body, bytes) if route.is_invocation else not route.open:
            record.finish(answer.status)
        return _response(answer, record.request_id)

    return view


def _answer(server: Server, route: Route, name: str | None, parts: dict[str, str], record: AccessRecord) -> Answer:
    dialect, blamed = DIALECTS[route.dialect], False
    try:
        listens = _check_listener(server, route)
        if not server.asks_who:
            check_cross_site(request.environ, listens, server.settings.allowed_hosts)
        blamed = not route.open  # not for pages of other sites, which would have the user of a browser refused
        caller = _anyone(server, route, record) if route.open else _checked_caller(server, record, route.scope)
        check_content_type(request.environ, route.content_types)
        if route.is_invocation:
            return invoke(server, _incoming(server, route, name, parts, caller), record)
        if route.handler in ANSWERS:
            return _managed(server, route, record, caller, name, parts)
        return PAGES[route.handler](server, caller, **({"name": name} if name is not None else {}))
    except ServingError as error:
        if (
            blamed
            and isinstance(error, RequestError)
            and not (isinstance(error, LimitExceeded) and error.limit == "refusals")
        ):
            server.refusals.charge(record.key or _address())
        record.finish(error.status, error.logged)
        return error_answer(dialect, error)
    except ClientGone:
        record.finish(Aborted.status, "the client went away")
        return Answer(status=Aborted.status)
    except HTTPException:
        raise
    except Exception:
        logs.event("fault", level=logging.ERROR, exc_info=True, request_id=record.request_id)
        record.finish(InternalError.status, "internal error")
        return error_answer(dialect, InternalError(f"internal error; the log has it under {record.request_id}"))


def _check_listener(server: Server, route: Route) -> str:
    """The address at which the listener that the request came to listens. Raises ``NotFound`` for a route that it does
    not have."""
    probes = came_to_probes(request.environ)
    if probes and route.handler not in PROBES:
        raise NotFound(f"no route {request.path[:100]} here: this listener is for probes and metrics")
    if not probes and route.handler == "metrics" and server.settings.probe_port is not None:
        raise NotFound("no metrics here: this server has a listener of its own for them (probe_port)")
    if server.settings.socket is not None and not probes:
        return ""  # which no browser reaches, under any name
    return (server.settings.probe_host if probes else None) or server.settings.host


def _incoming(server: Server, route: Route, name: str | None, parts: dict[str, str], caller: Caller) -> Incoming:
    assert route.inference is not None
    return Incoming(
        head=Head(route.inference, request.headers, parts),
        dialect=DIALECTS[route.dialect],
        receive=partial(read_body, request.environ, server.settings.max_body_bytes),
        is_large=is_large(request.environ, server.settings.offload_bytes),
        address=_address(),
        name=name,
        timeout=request.headers.get(TIMEOUT_HEADER),
        sticky_key=request.headers.get(STICKY_HEADER),
        caller=caller,
        sock=request.environ.get("gunicorn.socket"),
    )


def _managed(
    server: Server, route: Route, record: AccessRecord, caller: Caller, name: str | None, parts: dict[str, str]
) -> Answer:
    """A body counts as one of an invocation does, whether the route needs it or not."""
    with server.memory.allocate(caller.key_id if server.asks_who else _address()) as allocation:
        asked = Asked(
            caller=caller,
            request_id=record.request_id,
            name=name or "",
            parts=parts,
            body=read_body(request.environ, server.settings.max_body_bytes, allocation),
            query=request.args.to_dict(flat=False),
        )
        return ANSWERS[route.handler](server, asked)


def _access_record(tracer: Tracer = OFF) -> AccessRecord:
    return AccessRecord(
        request_id=request_id_from(request.headers.get(REQUEST_ID)),
        method=request.method,
        path=request.path,
        trace=tracer.context(request.headers.get("traceparent"), request.headers.get("tracestate")),
        tracer=tracer,
    )


def _checked_caller(server: Server, record: AccessRecord, scope: str | None) -> Caller:
    """``_caller``, unless too much of what it sent was refused. Raises ``LimitExceeded`` as well."""
    credential = request.headers.get("Authorization", "") if server.asks_who else ""
    server.refusals.check_stranger(_address(), credential)
    caller = _caller(server, record, scope)
    if server.asks_who:
        server.refusals.remember_good(credential)
        server.refusals.check(caller.key_id, "key")
    return caller


def _address() -> str:
    return address_in(request.environ)


def _caller(server: Server, record: AccessRecord, scope: str | None) -> Caller:
    """Who calls. Raises ``Unauthenticated``, ``PermissionDenied`` where the server asks who that is."""
    if not server.asks_who:
        return ANONYMOUS
    scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret:
        raise Unauthenticated("send an API key: Authorization: Bearer sk-…")
    if server.tokens is not None and not secret.startswith("sk-"):
        caller: Caller = server.tokens.verify(secret)
    elif server.keys is not None:
        caller = server.keys.verify(secret, scope=None)
    else:
        raise Unauthenticated("this server takes tokens, and no API keys")
    record.key = caller.key_id
    caller.check_scope(scope)
    return caller


def _anyone(server: Server, route: Route, record: AccessRecord) -> Caller:
    """Who asks for what is open to all: whoever shows that it is somebody, where that makes a difference."""
    if not server.asks_who:
        return ANONYMOUS
    if route.handler not in TELLS_MORE or "Authorization" not in request.headers:
        return UNKNOWN
    try:
        return _checked_caller(server, record, None)
    except Unauthenticated:  # it counts as a refusal: what is open is no place to try keys at
        server.refusals.charge(_address())
        return UNKNOWN
    except ServingError:  # probes do not depend on keys, nor on the store that has them
        return UNKNOWN


def _unrouted(error: HTTPException) -> Response:
    """What the framework refuses, in the dialect of the path. Nothing of a fault is shown."""
    refused = _refusal(error)
    answer = error_answer(dialect_of(request.path), refused)
    record = _access_record()
    if isinstance(refused, MethodNotAllowed) and (allowed := getattr(error, "valid_methods", None)):
        answer.headers["Allow"] = ", ".join(sorted(allowed))
    record.finish(answer.status, refused.logged)
    return _response(answer, record.request_id)


def _refusal(error: HTTPException) -> ServingError:
    if isinstance(error, werkzeug.NotFound):
        return NotFound(f"no route {request.path[:100]}; /openapi.json lists them")
    if isinstance(error, werkzeug.MethodNotAllowed):
        return MethodNotAllowed(f"{request.method[:20]} is not allowed on {request.path[:100]}")
    if isinstance(error, werkzeug.RequestEntityTooLarge):
        return PayloadTooLarge("the body is larger than this server takes")
    if error.code is not None and error.code < InternalError.status:
        return RequestError(f"{error.name}: the request could not be read")
    return InternalError("internal error")


def _response(answer: Answer, request_id: str) -> Response:
    response = Response(
        answer.body,
        status=answer.status,
        content_type=answer.content_type,
        headers=answer.headers,
        direct_passthrough=True,
    )
    response.headers[REQUEST_ID] = request_id
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response
