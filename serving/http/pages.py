"""The routes that answer about the server itself: lists, probes, metrics, documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version as installed_version
from typing import Any

from msgspec import structs

from ..engine.interface import EngineInfo, Health
from ..errors import NotFound, ShuttingDown, Unauthenticated, Unavailable
from ..metering.authorization import ANONYMOUS, UNKNOWN, Caller
from ..observability import metrics
from ..routing.replica_set import BEST_FIRST
from ..routing.served_endpoints import ServedEntity
from . import openapi
from .answer import Answer, json_answer
from .docs_page import POLICY, page
from .invoke import Server

NO_FIGURES = ("status", "kernels", "kernels_reason")  # of an endpoint's health
TASK_TYPES = {"chat": "llm/v1/chat", "completions": "llm/v1/completions", "embeddings": "llm/v1/embeddings"}


def _model(endpoint: ServedEntity, caller: Caller, adapter: str | None = None) -> dict[str, Any]:
    name = endpoint.name if adapter is None else f"{endpoint.name}:{adapter}"
    card = {"id": name, "object": "model", "created": endpoint.created, "owned_by": "mlflow-llm"}
    parent = {} if adapter is None else {"parent": endpoint.name}
    root = endpoint.entity_shown_to(caller)
    return {**card, **parent, "root": root, "max_model_len": endpoint.engine.info.max_model_len}


def list_models(server: Server, caller: Caller, **_: str) -> Answer:
    cards, seen = [], server.endpoints.seen_by(caller)
    for endpoint in seen:
        cards.append(_model(endpoint, caller))
        cards.extend(_model(endpoint, caller, adapter) for adapter in seen.adapters_of(endpoint))
    return json_answer({"object": "list", "data": cards})


def get_model(server: Server, caller: Caller, *, name: str) -> Answer:
    endpoint, adapter = server.endpoints.seen_by(caller).find(name)
    return json_answer(_model(endpoint, caller, adapter))


def _entry(endpoint: ServedEntity, caller: Caller) -> dict[str, Any]:
    """One endpoint as MLflow's deployments server describes it; ``limit`` must be there, null is fine."""
    return {
        "name": endpoint.name,
        "endpoint_type": TASK_TYPES[endpoint.tasks[0]],
        "model": {"name": endpoint.entity_shown_to(caller), "provider": "mlflow-llm"},
        "endpoint_url": f"/endpoints/{endpoint.name}/invocations",
        "limit": None,
    }


def list_endpoints(server: Server, caller: Caller, **_: str) -> Answer:
    seen = server.endpoints.seen_by(caller)
    return json_answer({"endpoints": [_entry(one, caller) for one in seen], "next_page_token": None})


def get_endpoint(server: Server, caller: Caller, *, name: str) -> Answer:
    endpoint, adapter = server.endpoints.seen_by(caller).find(name)
    if adapter is not None:
        raise NotFound(f"{name[:80]!r} is an adapter, not an endpoint", param="name")
    return json_answer(_entry(endpoint, caller))


def databricks_config(server: Server, caller: Caller, **_: str) -> Answer:
    return json_answer({})


def ping(server: Server, caller: Caller, **_: str) -> Answer:
    return Answer(body=b"\n", content_type="text/plain")


def version(server: Server, caller: Caller, **_: str) -> Answer:
    return Answer(body=installed_version("mlflow").encode(), content_type="text/plain")


def health(server: Server, caller: Caller = ANONYMOUS, **_: str) -> Answer:
    """200 while every served entity has a replica that makes progress (or nothing to do), 503 otherwise.

    Who shows no key to a server that asks for one sees the status alone. Who does not manage sees no figures: steps and
    requests are every tenant's, to the token where one of them is alone.
    """
    found: dict[str, dict[str, ServedEntity]] = {}
    for endpoint in server.endpoints.entities():
        found.setdefault(endpoint.name, {})[endpoint.entity] = endpoint
    told = {name: _progress_of_all(entities) for name, entities in found.items()}
    well = all(state["status"] == "ready" for state in told.values())
    seen = {name: _shown(state, caller) for name, state in told.items() if caller.may_see(name)}
    body = {"status": "OK" if well else "UNHEALTHY"} | ({} if caller.key_id == UNKNOWN.key_id else {"endpoints": seen})
    return json_answer(body, status=200 if well else Unavailable.status)


def _shown(state: dict[str, Any], caller: Caller) -> dict[str, Any]:
    if caller.manages:
        return state
    shown = {key: value for key, value in state.items() if key in NO_FIGURES}
    entities = {name: _shown(one, caller) for name, one in state.get("entities", {}).items()}
    return shown | ({"entities": entities} if entities else {})


def _progress_of_all(entities: dict[str, ServedEntity]) -> dict[str, Any]:
    """An endpoint's: the state of the entity that is worst, the others' work added; each by itself where there are
    several, else what it runs on."""
    healths = {name: entity.engine.health() for name, entity in entities.items()}
    worst = max(healths.values(), key=lambda health: BEST_FIRST.index(health.status))
    names = ("steps", "num_running", "num_waiting")
    sums = {name: sum(getattr(health, name) for health in healths.values()) for name in names}
    each = {name: _progress(healths[name]) | _facts(entity) for name, entity in entities.items()}
    more = {"entities": each} if len(each) > 1 else _facts(next(iter(entities.values())))
    return _progress(structs.replace(worst, **sums)) | more


def _facts(entity: ServedEntity) -> dict[str, Any]:
    return _kernels(entity.engine.info) | _standbys(entity)


def _kernels(info: EngineInfo) -> dict[str, Any]:
    reason = {"kernels_reason": info.kernels_reason} if info.kernels_reason else {}
    return {"kernels": info.kernels, **reason}


def _standbys(entity: ServedEntity) -> dict[str, Any]:
    """Those that are ready, where any are to be."""
    health = entity.engine.health()
    return {"standbys": health.num_standbys} if entity.engine.info.num_standbys or health.num_standbys else {}


def _progress(health: Health) -> dict[str, Any]:
    return {
        "status": health.status,
        "steps": health.steps,
        "last_step_age": round(health.last_step_age, 3),
        "running": health.num_running,
        "waiting": health.num_waiting,
        "processor_wait": health.processor_wait,
    }


def ready(server: Server, caller: Caller = ANONYMOUS, **_: str) -> Answer:
    """A worker takes requests only after each of its engines has generated a token, so being asked is proof of that."""
    if server.load_shedder.draining:
        raise ShuttingDown("the server is shutting down", retry_after=5.0)
    return health(server, caller)


def metrics_page(server: Server, caller: Caller, **_: str) -> Answer:
    """Every tenant's requests and tokens: where keys are asked for they are for who manages, or for who reaches the
    listener for probes."""
    if server.asks_who and server.settings.probe_port is None:
        if caller.key_id == UNKNOWN.key_id:
            raise Unauthenticated("metrics are every tenant's: send a key with the scope manage, or use --probe-port")
        caller.check_scope("manage")
    return Answer(body=metrics.exposition(server.endpoints, server.ledger), content_type=metrics.CONTENT_TYPE)


def openapi_document(server: Server, caller: Caller, **_: str) -> Answer:
    return json_answer(openapi.document())


def docs(server: Server, caller: Caller, **_: str) -> Answer:
    body, headers = page(openapi.document()).encode(), {"Content-Security-Policy": POLICY}
    return Answer(body=body, content_type="text/html; charset=utf-8", headers=headers)


PAGES: Mapping[str, Callable[..., Answer]] = {
    "list_models": list_models,
    "get_model": get_model,
    "list_endpoints": list_endpoints,
    "get_endpoint": get_endpoint,
    "databricks_config": databricks_config,
    "ping": ping,
    "version": version,
    "health": health,
    "ready": ready,
    "metrics": metrics_page,
    "openapi": openapi_document,
    "docs": docs,
}
