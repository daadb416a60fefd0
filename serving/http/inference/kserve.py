"""Describe the server and its models in KServe's protocol (v2); ``dialects.kserve`` handles its inference requests."""

from __future__ import annotations

from ...dialects import DIALECTS
from ...dialects.base import JSON
from ...dialects.json_body import read_object
from ...dialects.kserve.body import BINARY
from ...dialects.kserve.metadata import server_metadata
from ...dialects.kserve.reply_types import (
    IndexEntry,
    ModelConfig,
    ModelMetadata,
    ModelReady,
    ServerLive,
    ServerMetadata,
    ServerReady,
)
from ...frontend.addressing import VERSION
from ...frontend.answer import Answer, json_answer
from ...frontend.kserve_queries import answers, config_of, entries, find, metadata_of, takes_requests
from ...frontend.operation import Auth, Handler, Request, with_body
from ...frontend.worker_state import WorkerState
from ...interface.errors import ShuttingDown, Unavailable
from ...interface.readers import Entry, boolean, record
from ...routing.served_endpoints import ServedEndpoints, ServedEntity
from ..route import Listener, Route

_INDEX = record(ready=Entry(boolean, "true: only models that are ready"))


def is_live(server: WorkerState, request: Request) -> Answer:
    return json_answer({"live": True})


def is_ready(server: WorkerState, request: Request) -> Answer:
    """Return the same readiness as ``/ready``, without its details."""
    ready = takes_requests(server)
    return json_answer({"ready": ready}, status=200 if ready else Unavailable.status)


def of_server(server: WorkerState, request: Request) -> Answer:
    return json_answer(server_metadata())


def is_model_ready(server: WorkerState, request: Request) -> Answer:
    entity = _meant(server, request)
    if server.load_shedder.draining:
        raise ShuttingDown("the server is shutting down", retry_after=5.0)
    if not answers(entity):
        raise Unavailable(f"model {entity.endpoint} has no engine that is ready", retry_after=1.0)
    return json_answer({"name": entity.endpoint, "ready": True})


def of_model(server: WorkerState, request: Request) -> Answer:
    return json_answer(metadata_of(_seen(server, request), _meant(server, request)))


def config_of_model(server: WorkerState, request: Request) -> Answer:
    return json_answer(config_of(_meant(server, request)))


def index(server: WorkerState, request: Request) -> Answer:
    asked = read_object(request.body, lambda found: _INDEX(found, "")) if request.body.strip() else {}
    return json_answer(list(entries(_seen(server, request), only_ready=bool(asked.get("ready")))))


def _seen(server: WorkerState, request: Request) -> ServedEndpoints:
    return server.endpoints.seen_by(request.caller)


def _meant(server: WorkerState, request: Request) -> ServedEntity:
    return find(_seen(server, request), request.caller, request.name, request.path.get(VERSION))


_KSERVE = DIALECTS["kserve"]
_NOT_READY = {Unavailable.status: "Not ready"}
_PROBES: tuple[tuple[str, Handler, str, type, dict[int, str]], ...] = (
    ("live", is_live, "Liveness", ServerLive, {}),
    ("ready", is_ready, "Readiness", ServerReady, _NOT_READY),
)
_OF_MODEL: tuple[tuple[str, Handler, str, type], ...] = (
    ("", of_model, "A model's tensors", ModelMetadata),
    ("/ready", is_model_ready, "Readiness of a model", ModelReady),
    ("/config", config_of_model, "Configuration of a model, for Triton's clients", ModelConfig),
)

ROUTES = (
    *(
        Route(
            method="GET",
            path=f"/v2/health/{name}",
            handler=handler,
            summary=summary,
            dialect=_KSERVE,
            auth=Auth.OPEN,
            listener=Listener.BOTH,
            reply=reply,
            also=also,
        )
        for name, handler, summary, reply, also in _PROBES
    ),
    Route(
        method="GET",
        path="/v2",
        handler=of_server,
        summary="The server",
        dialect=_KSERVE,
        auth=Auth.OPEN,
        reply=ServerMetadata,
    ),
    *(
        Route(
            method="GET",
            path=f"/v2/models/<name>{version}{path}",
            handler=handler,
            summary=summary,
            dialect=_KSERVE,
            reply=reply,
        )
        for path, handler, summary, reply in _OF_MODEL
        for version in ("", f"/versions/<{VERSION}>")
    ),
    Route(
        method="POST",
        path="/v2/repository/index",
        handler=with_body(index),
        summary="Served models",
        dialect=_KSERVE,
        body=_INDEX,
        reply=list[IndexEntry],
        example={"ready": True},
        content_types=(JSON, BINARY, ""),
    ),
)
