"""Endpoints as the management API returns them, as types: the OpenAPI document has their schemas."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from ..interface.canary import Canary
from ..interface.dialect_settings import DialectSettings
from ..interface.guardrails import Guardrails
from ..interface.payload_log import PayloadLog
from ..interface.settings import PrefixSharing
from ..interface.shadow import Shadow
from ..interface.type_schema import fields, form
from ..metering.accounts.authorization import PermissionLevel
from .config import PlacementSetting
from .engine_hosts import EngineState
from .gateways import AdapterProgress
from .scale import Scale

Ready = Literal["READY", "NOT_READY"]
Origin = Literal["api", "command_line"]
ConfigUpdate = Literal["NOT_UPDATING", "IN_PROGRESS", "UPDATE_FAILED"]


class EndpointStateInfo(TypedDict):
    """``message`` says why an update failed."""

    ready: Ready
    config_update: ConfigUpdate
    message: NotRequired[str]


class DeploymentState(TypedDict):
    deployment: Literal["DEPLOYMENT_READY", "DEPLOYMENT_CREATING"]
    deployment_state_message: str


class ServedEntityInfo(TypedDict):
    """A served entity as it was asked for, and the model that was found for it."""

    name: str
    entity_name: str
    entity_version: str
    min_provisioned_throughput: NotRequired[int]
    max_provisioned_throughput: NotRequired[int]
    scale_to_zero_enabled: bool
    engine_settings: NotRequired[dict[str, Any]]
    defaults: NotRequired[dict[str, Any]]
    follow_alias: NotRequired[bool]
    canary: NotRequired[Canary]
    canary_of: NotRequired[str]
    shadow: NotRequired[Shadow]
    placement: NotRequired[PlacementSetting]
    replicas: NotRequired[int]
    scale: NotRequired[Scale]
    resolved_name: NotRequired[str]
    resolved_version: NotRequired[str]
    content_hash: NotRequired[str]
    request_defaults: NotRequired[dict[str, Any]]
    state: DeploymentState


class ServedModelInfo(TypedDict):
    """The same under Databricks' older names."""

    name: str
    model_name: str
    model_version: str
    state: DeploymentState


class RouteInfo(TypedDict):
    served_model_name: str
    served_entity_name: str
    traffic_percentage: int


class TrafficInfo(TypedDict):
    routes: list[RouteInfo]
    sticky: NotRequired[bool]


ConfigInfo = form(
    "ConfigInfo",
    "A configuration: entities, their shares of the traffic, and the endpoint's own settings.",
    {
        "served_entities": list[ServedEntityInfo],
        "served_models": list[ServedModelInfo],
        "traffic_config": TrafficInfo,
        "prefix_sharing": NotRequired[PrefixSharing],
        "payload_log": NotRequired[PayloadLog],
        "guardrails": NotRequired[Guardrails],
        **{name: NotRequired[hint] for name, hint in fields(DialectSettings).items()},
        "config_version": int,
        "start_time": NotRequired[int],
    },
)


class TagInfo(TypedDict):
    key: str
    value: str


class RateLimitInfo(TypedDict):
    calls: int
    key: Literal["endpoint", "user"]
    renewal_period: Literal["minute"]


class AdapterState(TypedDict):
    """An adapter that was loaded at run time, as one gateway has it; ``message`` says why an engine refused it, or why
    its files could not be fetched from the database yet."""

    name: str
    state: AdapterProgress
    content_hash: NotRequired[str]
    message: NotRequired[str]


class GatewayState(TypedDict):
    """An endpoint as one gateway of the database serves it, by its last report.

    ``config_version`` is what all of its workers serve, ``content_hash`` that config's hash; ``message`` says why the
    gateway cannot serve the newest one."""

    gateway: str
    state: Literal["READY", "NOT_READY", "LOADING", "STARTING", "FAILED"]
    config_version: NotRequired[int]
    content_hash: NotRequired[str]
    message: NotRequired[str]
    adapters: NotRequired[list[AdapterState]]


class HostedReplica(TypedDict):
    """An engine of a served entity on a joined host, by that host's last report. ``address`` is where a READY one
    answers, ``message`` why a FAILED one does not run, or what the start of its host waits for."""

    served_entity: str
    host: str
    state: EngineState
    address: NotRequired[str]
    message: NotRequired[str]


class HostDeviceInfo(TypedDict):
    """A GPU of a joined host, with its memory in bytes."""

    name: str
    memory: int


class HostEngineInfo(TypedDict):
    """An engine that was placed on a host. ``model`` names it with its version; ``address`` is where a READY one
    answers, ``message`` why a FAILED one does not run."""

    model: str
    content_hash: str
    state: EngineState
    address: NotRequired[str]
    message: NotRequired[str]


class EngineHostInfo(TypedDict):
    """A host that has joined the database to run engines. ``memory`` is what it offers, in bytes; ``generation`` grows
    with every start of its command. Nothing new is placed on one that drains. A runtime has been told to start one that
    is ORDERED; ``message`` says what that waits for, or why it FAILED."""

    name: str
    id: str
    generation: int
    started_timestamp: int
    state: Literal["ACTIVE", "DRAINING", "ORDERED", "FAILED"]
    message: NotRequired[str]
    memory: int
    cpus: int
    devices: list[HostDeviceInfo]
    engines: list[HostEngineInfo]


class EngineHostInfos(TypedDict):
    """All hosts that have joined, sorted by name."""

    hosts: list[EngineHostInfo]


class EndpointInfo(TypedDict):
    """An endpoint. Callers who do not manage see no configuration, tags, limits, messages or creator."""

    name: str
    id: str
    creator: NotRequired[str]
    creation_timestamp: int
    last_updated_timestamp: int
    description: NotRequired[str]
    state: EndpointStateInfo
    tags: NotRequired[list[TagInfo]]
    task: Literal["llm/v1/chat", "llm/v1/completions", "llm/v1/embeddings", "llm/v1/score"]
    permission_level: PermissionLevel
    config: NotRequired[ConfigInfo]  # type: ignore[valid-type]
    pending_config: NotRequired[ConfigInfo]  # type: ignore[valid-type]
    config_origin: NotRequired[Origin]
    pending_config_origin: NotRequired[Origin]
    rate_limits: NotRequired[list[RateLimitInfo]]
    gateways: NotRequired[list[GatewayState]]
    hosts: NotRequired[list[HostedReplica]]


class ConfigVersionInfo(TypedDict):
    """A version of an endpoint's configuration. ``restores`` is the earlier version that a rollback made it of.

    A version with a canary ends as ``promoted``, ``rolled_back``, or ``stopped`` by an update; ``message`` says why."""

    config_version: int
    state: Literal["active", "pending", "failed", "superseded", "replaced", "promoted", "rolled_back", "stopped"]
    creator: str
    creation_timestamp: int
    config: ConfigInfo  # type: ignore[valid-type]
    message: NotRequired[str]
    restores: NotRequired[int]


class ConfigVersions(TypedDict):
    """Every version, the newest first."""

    versions: list[ConfigVersionInfo]


class EndpointInfos(TypedDict):
    endpoints: list[EndpointInfo]


class TagInfos(TypedDict):
    tags: list[TagInfo]


class RateLimitInfos(TypedDict):
    rate_limits: list[RateLimitInfo]
