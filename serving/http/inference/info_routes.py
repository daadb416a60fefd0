"""The routes that answer about the server itself: lists of models and endpoints, probes, metrics."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version as installed_version
from typing import Any, get_args

from msgspec import structs

from ...dialects import DIALECTS
from ...dialects.anthropic.reply_types import ModelInfo, ModelPage
from ...dialects.fields.defaults import own_sampling
from ...dialects.openai.reply_types import ModelCard, ModelList, ModelVersionServed
from ...frontend.answer import Answer, json_answer
from ...frontend.operation import Auth, Request
from ...frontend.readiness import reason_against
from ...frontend.worker_state import WorkerState
from ...interface.engine import EngineInfo, Health
from ...interface.errors import NotFound, ShuttingDown, Unauthenticated, Unavailable
from ...interface.request import Task
from ...metering.accounts.authorization import UNKNOWN, Caller
from ...observability import metrics
from ...routing.replica_set import BEST_FIRST
from ...routing.served_endpoints import ServedEndpoints, ServedEntity
from ..route import Listener, NoFields, Route
from . import anthropic_models
from .reply_types import DeploymentEndpoint, DeploymentEndpoints, ServerHealth, TaskType

# fields of an endpoint's health that every caller may see; most of the others count the work of all tenants
SHOWN = ("kernels_reason", "instruction_set", "quantization_reason", "kv_cache_dtype", "kv_cache_reason")
NAMED = (*SHOWN, "max_num_batched_tokens")
SHOWN_TO_ALL = ("status", "kernels", "quantization", *SHOWN, "paged")
TASK_TYPES: Mapping[Task, TaskType] = dict(zip(get_args(Task), get_args(TaskType), strict=True))


def _named(entity: ServedEntity, adapter: str | None) -> anthropic_models.Named:
    name = entity.endpoint if adapter is None else f"{entity.endpoint}:{adapter}"
    return anthropic_models.Named(name, entity)


def _model(seen: ServedEndpoints, entity: ServedEntity, caller: Caller, adapter: str | None = None) -> ModelCard:
    """Return an endpoint or one of its adapters in OpenAI's form, with the model versions that answer.

    ``sampling_defaults`` are values of its own for requests that set none; without any, the field is absent."""
    card: ModelCard = {
        "id": _named(entity, adapter).name,
        "object": "model",
        "created": entity.created,
        "owned_by": "mlflow-llm",
        "root": entity.entity_shown_to(caller),
        "max_model_len": entity.engine.info.max_model_len,
        "served_models": [_served(one, caller) for one in seen.entities() if one.endpoint == entity.endpoint],
    }
    if adapter is not None:
        card["parent"] = entity.endpoint
    own = own_sampling(entity.view.defaults)
    if own:
        card["sampling_defaults"] = own
    return card


def _served(entity: ServedEntity, caller: Caller) -> ModelVersionServed:
    """Return which version of which model is served; the model's name in the registry only to who manages."""
    model = entity.identity
    shown: ModelVersionServed = {"name": entity.entity_shown_to(caller)}
    if model.version:
        shown["model_version"] = model.version
    if model.content_hash:
        shown["content_hash"] = model.content_hash
    if model.name and caller.manages:
        shown["model_name"] = model.name
    return shown


def list_models(server: WorkerState, request: Request) -> Answer:
    seen = server.endpoints.seen_by(request.caller)
    found = [(entity, adapter) for entity in seen for adapter in (None, *seen.adapters_of(entity))]
    if anthropic_models.is_meant(request):
        return anthropic_models.page_of(request, [_named(entity, adapter) for entity, adapter in found])
    return json_answer(
        {"object": "list", "data": [_model(seen, entity, request.caller, adapter) for entity, adapter in found]}
    )


def get_model(server: WorkerState, request: Request) -> Answer:
    seen = server.endpoints.seen_by(request.caller)
    entity, adapter = seen.find(request.name)
    if anthropic_models.is_meant(request):
        return anthropic_models.one_model(request, _named(entity, adapter))
    return json_answer(_model(seen, entity, request.caller, adapter))


def _entry(entity: ServedEntity, caller: Caller) -> DeploymentEndpoint:
    """Return one endpoint in the form of MLflow's deployments server, where ``limit`` is required but may be null."""
    return {
        "name": entity.endpoint,
        "endpoint_type": TASK_TYPES[entity.tasks[0]],
        "model": {"name": entity.entity_shown_to(caller), "provider": "mlflow-llm"},
        "endpoint_url": f"/endpoints/{entity.endpoint}/invocations",
        "limit": None,
    }


def list_endpoints(server: WorkerState, request: Request) -> Answer:
    seen = server.endpoints.seen_by(request.caller)
    return json_answer({"endpoints": [_entry(one, request.caller) for one in seen], "next_page_token": None})


def get_endpoint(server: WorkerState, request: Request) -> Answer:
    entity, adapter = server.endpoints.seen_by(request.caller).find(request.name)
    if adapter is not None:
        raise NotFound(f"{request.name[:80]!r} is an adapter, not an endpoint", param="name")
    return json_answer(_entry(entity, request.caller))


def databricks_config(server: WorkerState, request: Request) -> Answer:
    return json_answer({})


def ping(server: WorkerState, request: Request) -> Answer:
    return Answer(body=b"\n", content_type="text/plain")


def version(server: WorkerState, request: Request) -> Answer:
    return Answer(body=installed_version("mlflow").encode(), content_type="text/plain")


def health(server: WorkerState, request: Request) -> Answer:
    """Respond with 200 if every served entity has a replica that makes progress or has nothing to do, else with 503.

    Without a key, on a server that requires one, only the status is shown. Without the scope ``manage``, no counters
    are shown: steps and requests count the work of all tenants, and reveal a single active tenant's to the token.
    """
    found: dict[str, dict[str, ServedEntity]] = {}
    for entity in server.endpoints.entities():
        found.setdefault(entity.endpoint, {})[entity.entity] = entity
    states = {name: _progress_of_all(entities) for name, entities in found.items()}
    well = all(state["status"] == "ready" for state in states.values())
    caller = request.caller
    seen = {name: _shown(state, caller) for name, state in states.items() if caller.may_see(name)}
    body = {"status": "OK" if well else "UNHEALTHY"} | ({} if caller.key_id == UNKNOWN.key_id else {"endpoints": seen})
    return json_answer(body, status=200 if well else Unavailable.status)


def _shown(state: dict[str, Any], caller: Caller) -> dict[str, Any]:
    if caller.manages:
        return state
    shown = {key: value for key, value in state.items() if key in SHOWN_TO_ALL}
    entities = {name: _shown(one, caller) for name, one in state.get("entities", {}).items()}
    return shown | ({"entities": entities} if entities else {})


def _progress_of_all(entities: dict[str, ServedEntity]) -> dict[str, Any]:
    """Return the progress of an endpoint: the state of its worst entity, with the work of all entities summed.

    With several entities, each is also listed separately; a single one adds its own facts instead. Shadows are listed
    too, and count towards neither.
    """
    healths = {name: entity.engine.health() for name, entity in entities.items()}
    worst = max(healths.values(), key=lambda health: BEST_FIRST.index(health.status))
    names = ("steps", "num_running", "num_waiting")
    sums = {name: sum(getattr(health, name) for health in healths.values()) for name in names}
    each = {name: _progress(healths[name]) | _facts(entity) for name, entity in entities.items()}
    first = next(iter(entities.values()))
    more = {"entities": each} if len(each) > 1 else _facts(first)
    if first.shadows:
        more["shadows"] = {one.entity: _progress(one.engine.health()) | _facts(one) for one in first.shadows}
    return _progress(structs.replace(worst, **sums)) | more


def _facts(entity: ServedEntity) -> dict[str, Any]:
    return _kernels(entity.engine.info) | _standbys(entity) | _memory(entity)


def _kernels(info: EngineInfo) -> dict[str, Any]:
    quantized = {} if info.quantization == "none" else {"quantization": info.quantization}
    more = {name: value for name in NAMED if (value := getattr(info, name))}
    paged = {} if info.paged is None else {"paged": structs.asdict(info.paged)}
    return {"kernels": info.kernels} | quantized | more | paged


def _memory(entity: ServedEntity) -> dict[str, Any]:
    """Return the memory of the entity's engine; if it is unloaded, also why, and how long a start takes."""
    record = entity.engine.record()
    if not record.unloaded:
        return {"memory": record.memory} if record.measured else {}
    return {"unloaded": record.unloaded, "memory": record.memory, "start_seconds": record.start_seconds}


def _standbys(entity: ServedEntity) -> dict[str, Any]:
    """Return the number of ready standbys, if the engine has or should have any."""
    health = entity.engine.health()
    return {"standbys": health.num_standbys} if entity.engine.info.num_standbys or health.num_standbys else {}


def _progress(health: Health) -> dict[str, Any]:
    return {
        "status": health.status,
        "steps": health.steps,
        "last_step_age": round(health.last_step_age, 3),
        "running": health.num_running,
        "waiting": health.num_waiting,
        "cpu_wait": health.cpu_wait,
        "processor_wait": health.cpu_wait,  # its old name, until the next release
    }


def ready(server: WorkerState, request: Request) -> Answer:
    """Respond as ``health`` does, or with an error if requests should go to another server (``readiness``).

    A worker starts to serve only after each of its engines has generated a token, so a 200 proves that they work.
    """
    if reason := reason_against(server):
        kind = ShuttingDown if server.load_shedder.draining else Unavailable
        raise kind(reason if request.caller.key_id != UNKNOWN.key_id else "the server is not ready", retry_after=5.0)
    return health(server, request)


def metrics_exposition(server: WorkerState, request: Request) -> Answer:
    """Return the metrics, which count the requests and tokens of all tenants.

    If keys are required, this needs the scope ``manage`` or a separate listener for probes.
    """
    if server.requires_key and server.settings.probe_port is None:
        if request.caller.key_id == UNKNOWN.key_id:
            raise Unauthenticated("metrics cover all tenants: send a key with the scope manage, or use --probe-port")
        request.caller.check_scope("manage")
    return Answer(body=metrics.exposition(server.endpoints, server.ledger), content_type=metrics.CONTENT_TYPE)


_OPENAI, _DATABRICKS, _TEXT = DIALECTS["openai"], DIALECTS["databricks"], ("text/plain",)
_STALLED = {Unavailable.status: "An engine makes no progress"}

ROUTES = (
    Route(
        method="GET",
        path="/v1/models",
        handler=list_models,
        reply=ModelList | ModelPage,
        summary="Endpoints and their adapters",
        dialect=_OPENAI,
        by_header=anthropic_models.BY_HEADER,
    ),
    Route(
        method="GET",
        path="/v1/models/<path:name>",
        handler=get_model,
        reply=ModelCard | ModelInfo,
        summary="One endpoint or endpoint:adapter",
        dialect=_OPENAI,
        by_header=anthropic_models.BY_HEADER,
    ),
    Route(
        method="GET",
        path="/.well-known/databricks-config",
        handler=databricks_config,
        reply=NoFields,
        summary="Discovery; empty",
        dialect=_DATABRICKS,
        auth=Auth.OPEN,
    ),
    Route(
        method="GET",
        path="/api/2.0/endpoints/",
        handler=list_endpoints,
        reply=DeploymentEndpoints,
        summary="Endpoints, as MLflow's deployments server lists them",
    ),
    Route(
        method="GET",
        path="/api/2.0/endpoints/<name>",
        handler=get_endpoint,
        reply=DeploymentEndpoint,
        summary="One endpoint",
    ),
    Route(
        method="GET",
        path="/ping",
        handler=ping,
        summary="Liveness",
        auth=Auth.OPEN,
        listener=Listener.BOTH,
        produces=_TEXT,
    ),
    Route(
        method="GET",
        path="/health",
        handler=health,
        reply=ServerHealth,
        summary="Readiness of engines",
        auth=Auth.OPTIONAL,
        listener=Listener.BOTH,
        also=_STALLED,
    ),
    Route(
        method="GET",
        path="/ready",
        handler=ready,
        reply=ServerHealth,
        summary="Readiness",
        auth=Auth.OPTIONAL,
        listener=Listener.BOTH,
        also=_STALLED,
    ),
    Route(
        method="GET",
        path="/version",
        handler=version,
        summary="Supported version of MLflow",
        auth=Auth.OPEN,
        produces=_TEXT,
    ),
    Route(
        method="GET",
        path="/metrics",
        handler=metrics_exposition,
        summary="Prometheus metrics",
        auth=Auth.OPTIONAL,
        listener=Listener.PROBES,
        produces=_TEXT,
    ),
)
