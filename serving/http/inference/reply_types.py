"""The objects of the routes about the server itself, as types: the OpenAPI document has their schemas."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from ...interface.engine import PagedInfo

TaskType = Literal["llm/v1/chat", "llm/v1/completions", "llm/v1/embeddings", "llm/v1/score"]  # as ``Task`` has them


class ServedModelName(TypedDict):
    name: str
    provider: Literal["mlflow-llm"]


class DeploymentEndpoint(TypedDict):
    """An endpoint in the form of MLflow's deployments server."""

    name: str
    endpoint_type: TaskType
    model: ServedModelName
    endpoint_url: str
    limit: None


class DeploymentEndpoints(TypedDict):
    endpoints: list[DeploymentEndpoint]
    next_page_token: None


EngineStatus = Literal["starting", "ready", "draining", "stalled", "dead"]


class EntityHealth(TypedDict):
    """The progress of a served entity's engines. Callers who do not manage see its status and kernels alone."""

    status: EngineStatus
    steps: NotRequired[int]
    last_step_age: NotRequired[float]
    running: NotRequired[int]
    waiting: NotRequired[int]
    cpu_wait: NotRequired[float]
    processor_wait: NotRequired[float]  # the old name of cpu_wait, until the next release
    kernels: NotRequired[str]
    kernels_reason: NotRequired[str]
    instruction_set: NotRequired[str]
    quantization: NotRequired[str]
    quantization_reason: NotRequired[str]
    kv_cache_dtype: NotRequired[str]
    kv_cache_reason: NotRequired[str]
    max_num_batched_tokens: NotRequired[int]
    paged: NotRequired[PagedInfo]
    standbys: NotRequired[int]
    memory: NotRequired[int]
    unloaded: NotRequired[str]
    start_seconds: NotRequired[float | None]


class EndpointHealth(EntityHealth):
    """The state of an endpoint: its worst entity's, with the work of all; several entities are listed too.
    Shadows do not count towards it; callers who manage see theirs."""

    entities: NotRequired[dict[str, EntityHealth]]
    shadows: NotRequired[dict[str, EntityHealth]]


class ServerHealth(TypedDict):
    """Without a key, on a server that requires one, only ``status`` is shown."""

    status: Literal["OK", "UNHEALTHY"]
    endpoints: NotRequired[dict[str, EndpointHealth]]


ModelState = Literal["AVAILABLE", "LOADING", "UNLOADING", "END"]


class VersionStatus(TypedDict):
    error_code: str
    error_message: str


class VersionState(TypedDict):
    version: str
    state: ModelState
    status: VersionStatus


class ModelVersionStates(TypedDict):
    """The states of a model's versions, as OpenVINO Model Server has them."""

    model_version_status: list[VersionState]


ModelStates = dict[str, ModelVersionStates]
