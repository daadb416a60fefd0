"""The routes that answer about the server itself: lists, probes, metrics, documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version as installed_version
from typing import Any

from msgspec import structs

from ..engine.interface import EngineInfo, Health
from ..errors import NotFound, ShuttingDown
from . import metrics, openapi
from .answer import Answer, json_answer
from .docs_page import POLICY, page
from .endpoints import Endpoint
from .invoke import Server
from .replicas import BEST_FIRST

TASK_TYPES = {"chat": "llm/v1/chat", "completions": "llm/v1/completions", "embeddings": "llm/v1/embeddings"}


def _model(endpoint: Endpoint, adapter: str | None = None) -> dict[str, Any]:
    name = endpoint.name if adapter is None else f"{endpoint.name}:{adapter}"
    card = {"id": name, "object": "model", "created": endpoint.created, "owned_by": "mlflow-llm"}
    parent = {} if adapter is None else {"parent": endpoint.name}
    return {**card, **parent, "root": endpoint.entity, "max_model_len": endpoint.engine.info.max_model_len}


def list_models(server: Server, **_: str) -> Answer:
    cards = []
    for endpoint in server.endpoints:
        cards.append(_model(endpoint))
        cards.extend(_model(endpoint, adapter) for adapter in endpoint.adapter_names())
    return json_answer({"object": "list", "data": cards})


def get_model(server: Server, *, name: str) -> Answer:
    endpoint, adapter = server.endpoints.find(name)
    return json_answer(_model(endpoint, adapter))


def _entry(endpoint: Endpoint) -> dict[str, Any]:
    """One endpoint as MLflow's deployments server describes it; ``limit`` must be there, null is fine."""
    return {
        "name": endpoint.name,
        "endpoint_type": TASK_TYPES[endpoint.tasks[0]],
        "model": {"name": endpoint.entity, "provider": "mlflow-llm"},
        "endpoint_url": f"/endpoints/{endpoint.name}/invocations",
        "limit": None,
    }


def list_endpoints(server: Server, **_: str) -> Answer:
    return json_answer({"endpoints": [_entry(e) for e in server.endpoints], "next_page_token": None})


def get_endpoint(server: Server, *, name: str) -> Answer:
    endpoint, adapter = server.endpoints.find(name)
    if adapter is not None:
        raise NotFound(f"{name[:80]!r} is an adapter, not an endpoint", param="name")
    return json_answer(_entry(endpoint))


def databricks_config(server: Server, **_: str) -> Answer:
    return json_answer({})


def ping(server: Server, **_: str) -> Answer:
    return Answer(body=b"\n", content_type="text/plain")


def version(server: Server, **_: str) -> Answer:
    return Answer(body=installed_version("mlflow").encode(), content_type="text/plain")


def health(server: Server, **_: str) -> Answer:
    """200 while every served entity has a replica that makes progress (or nothing to do), 503 otherwise."""
    found: dict[str, dict[str, Endpoint]] = {}
    for endpoint in server.endpoints.entities():
        found.setdefault(endpoint.name, {})[endpoint.entity] = endpoint
    told = {name: _progress_of_all(entities) for name, entities in found.items()}
    well = all(state["status"] == "ready" for state in told.values())
    return json_answer({"status": "OK" if well else "UNHEALTHY", "endpoints": told}, status=200 if well else 503)


def _progress_of_all(entities: dict[str, Endpoint]) -> dict[str, Any]:
    """An endpoint's: the state of the entity that is worst, the others' work added; each by itself where there are
    several, else what it runs on."""
    healths = {name: entity.engine.health() for name, entity in entities.items()}
    worst = max(healths.values(), key=lambda health: BEST_FIRST.index(health.status))
    names = ("steps", "num_running", "num_waiting")
    sums = {name: sum(getattr(health, name) for health in healths.values()) for name in names}
    each = {name: _progress(healths[name]) | _kernels(entity.engine.info) for name, entity in entities.items()}
    more = {"entities": each} if len(each) > 1 else _kernels(next(iter(entities.values())).engine.info)
    return _progress(structs.replace(worst, **sums)) | more


def _kernels(info: EngineInfo) -> dict[str, Any]:
    reason = {"kernels_reason": info.kernels_reason} if info.kernels_reason else {}
    return {"kernels": info.kernels, **reason}


def _progress(health: Health) -> dict[str, Any]:
    return {
        "status": health.status,
        "steps": health.steps,
        "last_step_age": round(health.last_step_age, 3),
        "running": health.num_running,
        "waiting": health.num_waiting,
    }


def ready(server: Server, **_: str) -> Answer:
    """A worker takes requests only after each of its engines has generated a token, so being asked is proof of that."""
    if server.gate.draining:
        raise ShuttingDown("the server is shutting down", retry_after=5.0)
    return health(server)


def metrics_page(server: Server, **_: str) -> Answer:
    return Answer(body=metrics.exposition(server.endpoints), content_type=metrics.CONTENT_TYPE)


def openapi_document(server: Server, **_: str) -> Answer:
    return json_answer(openapi.document())


def docs(server: Server, **_: str) -> Answer:
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
