"""The configuration of an endpoint: what is served, and how traffic is split."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from ..interface.bundle import Bundle
from ..interface.canary import Canary
from ..interface.dialect_settings import DialectSettings
from ..interface.guardrails import Guardrails, shown
from ..interface.payload_log import PayloadLog
from ..interface.settings import EngineSettings, PrefixSharing
from ..interface.shadow import Shadow
from ..model_files.entity_names import label_of
from ..model_files.model_uri import LATEST, by_version, parse
from ..model_files.model_version import ModelVersion
from .scale import Scale

PlacementSetting: TypeAlias = Literal["local", "hosts"]


class ModelSource(Struct, frozen=True, kw_only=True):
    """The model behind a served entity, as it was found when the endpoint's configuration was accepted.

    ``uri`` names a version even if an alias was asked for, so that a configuration never changes by itself.

    ``defaults`` are values for request fields that a request lacks. ``core`` replaces the engine's own class.
    ``addresses`` (``tcp://host:port``) are engines that run on other hosts, with the key in ``key_file``: each is one
    replica, and none is started here.
    """

    uri: str
    bundle: Bundle
    engine: EngineSettings = EngineSettings()
    defaults: dict[str, Any] = {}
    core: str | None = None
    addresses: tuple[str, ...] = ()
    key_file: str | None = None

    @property
    def identity(self) -> ModelVersion:
        """The model and its version."""
        return ModelVersion.of(self.uri, self.bundle.content_hash)


class EntityConfig(Struct, frozen=True, kw_only=True):
    """A served entity as it was asked for: a registered model and version (or ``@alias``), or a URI or directory, which
    has no version.

    With ``max_provisioned_throughput`` (tokens/s), it is provisioned. ``engine_settings`` replace those saved with the
    model; ``defaults`` (request fields) override the model's own. ``source`` is the model that was found; it is stored,
    but only its effective request defaults are shown. With ``shadow``, it gets copies of requests and no traffic.

    With ``follow_alias``, the leader of the gateways moves the entity to the version that its alias means by then, at
    once or by way of a ``canary``. A canary is itself an entity, with the name of its original in ``canary_of``.

    ``placement`` says where its engines run: each gateway starts its own on its host ("local", and None), or they run
    on hosts that have joined the database ("hosts"), ``replicas`` of them for all gateways. With ``scale``, they run on
    hosts that a runtime starts for them, which join like any other.

    ``asked`` is the URI, directory or hub id that a command line declared the entity with, where that cannot be its
    name; then the name is a label made of it (``entity_names.label_of``). Prices may be set by it, and requests may
    name it. An update that keeps the model keeps it.
    """

    name: str
    entity_name: str
    entity_version: str
    min_provisioned_throughput: int | None = None
    max_provisioned_throughput: int | None = None
    scale_to_zero_enabled: bool = False
    engine_settings: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    follow_alias: bool = False
    canary: Canary | None = None
    canary_of: str | None = None
    shadow: Shadow | None = None
    source: ModelSource | None = None
    placement: PlacementSetting | None = None
    replicas: int | None = None
    scale: Scale | None = None
    asked: str = ""

    @property
    def is_hosted(self) -> bool:
        """Whether its engines run on joined hosts."""
        return self.placement == "hosts"

    @property
    def is_elsewhere(self) -> bool:
        """Whether its engines are not the gateways' own."""
        return self.is_hosted or (self.source is not None and bool(self.source.addresses))

    @property
    def model(self) -> ModelSource:
        """``source``, which a stored configuration always has."""
        assert self.source is not None
        return self.source

    @property
    def identity(self) -> ModelVersion:
        """The model and its version, with what a command line asked for."""
        return msgspec.structs.replace(self.model.identity, asked=self.asked)

    @property
    def is_label(self) -> bool:
        """Whether its name was made of what a command line asked for, and not given by anybody."""
        return bool(self.asked) and self.name == label_of(self.asked)

    @property
    def uri(self) -> str:
        """The URI by which MLflow fetches the model."""
        if not self.entity_version:
            return self.entity_name
        return by_version(self.entity_name, self.entity_version).uri

    @property
    def provisioned(self) -> bool:
        return self.max_provisioned_throughput is not None

    @property
    def reserve(self) -> tuple[str, int | None]:
        """The field that asks for provisioned throughput, and its value."""
        if self.min_provisioned_throughput:
            return "min_provisioned_throughput", self.min_provisioned_throughput
        return "max_provisioned_throughput", self.max_provisioned_throughput


class Route(Struct, frozen=True, kw_only=True):
    """The share of an endpoint's traffic, in percent, that a served entity gets."""

    served_model_name: str
    traffic_percentage: int


class EndpointConfig(Struct, frozen=True, kw_only=True):
    """The configuration of an endpoint.

    With ``sticky``, all requests of an API key go to the served entity that the key is assigned to. ``profile`` names
    the defaults and limits of requests; ``prefix_sharing`` says who reuses whose prompt prefixes. For both, and for the
    settings of ``dialects``, None means the server's value. Without ``payload_log``, no text is logged, and
    without ``guardrails``, none is looked at.
    """

    served_entities: tuple[EntityConfig, ...]
    routes: tuple[Route, ...]
    sticky: bool = False
    profile: str | None = None
    prefix_sharing: PrefixSharing | None = None
    payload_log: PayloadLog | None = None
    guardrails: Guardrails | None = None
    dialects: DialectSettings = DialectSettings()

    @property
    def canary(self) -> EntityConfig | None:
        """The entity that is a canary; there is one at most."""
        return next((entity for entity in self.served_entities if entity.canary_of is not None), None)

    def entity(self, name: str) -> EntityConfig:
        """Return the served entity of this name, which there is."""
        return next(entity for entity in self.served_entities if entity.name == name)

    def share(self, name: str) -> int:
        """Return the percentage of the traffic that a served entity gets."""
        return sum(route.traffic_percentage for route in self.routes if route.served_model_name == name)


def moves(uri: str) -> bool:
    """Return whether ``uri`` names a registered model by an alias or as the latest: another version may become it."""
    named = parse(uri)
    return named is not None and (named.alias is not None or (named.version or "").lower() == LATEST)


def without_canary(config: EndpointConfig) -> EndpointConfig:
    """Return ``config`` with the traffic of its canary given back to the entity that the canary is of."""
    canary = config.canary
    if canary is None:
        return config
    shares = {route.served_model_name: route.traffic_percentage for route in config.routes}
    given_back = shares.pop(canary.name, 0)
    shares[canary.canary_of or ""] += given_back
    return msgspec.structs.replace(
        config,
        served_entities=tuple(entity for entity in config.served_entities if entity is not canary),
        routes=tuple(Route(served_model_name=name, traffic_percentage=share) for name, share in shares.items()),
    )


def with_sources_of(config: EndpointConfig, present: EndpointConfig) -> EndpointConfig:
    """Return ``config`` with the versions that ``present`` serves for entities that follow the same alias in both.

    Which version of a followed alias is served is up to the leader of the gateways, not to a command line that starts.
    """
    served = {(entity.name, entity.uri): entity for entity in present.served_entities if entity.follow_alias}

    def keeping(entity: EntityConfig) -> EntityConfig:
        there = served.get((entity.name, entity.uri))
        if there is None or not entity.follow_alias:
            return entity
        found = there.model
        source = msgspec.structs.replace(entity.model, uri=found.uri, bundle=found.bundle, defaults=found.defaults)
        return msgspec.structs.replace(entity, source=source)

    return msgspec.structs.replace(config, served_entities=tuple(map(keeping, config.served_entities)))


def changes(before: EndpointConfig, after: EndpointConfig) -> Iterator[str]:
    """Yield a sentence for each served entity that has another model in ``after`` although it was asked for by the same
    name, such as an alias that has moved."""
    earlier = {entity.uri: entity.model.identity for entity in before.served_entities}
    for entity in after.served_entities:
        was, now = earlier.get(entity.uri), entity.model.identity
        if was is not None and was != now:
            yield f"{entity.uri} is {now} now; it was {was}"


def is_same(one: EndpointConfig, other: EndpointConfig) -> bool:
    """Return whether two configurations say the same, wherever the files of their models are.

    A model is named by its URI and its content hash. Its files may be in another directory of each machine and each
    user, and after each download; so may a directory that a command line names by its relative path.
    """
    return _anywhere(one) == _anywhere(other)


def _anywhere(config: EndpointConfig) -> EndpointConfig:
    """Return ``config`` without the local directories of its models."""
    return msgspec.structs.replace(config, served_entities=tuple(map(_entity_anywhere, config.served_entities)))


def _entity_anywhere(entity: EntityConfig) -> EntityConfig:
    if entity.source is None:
        return entity
    bundle = entity.source.bundle
    draft = None if bundle.draft is None else msgspec.structs.replace(bundle.draft, model_dir="", tokenizer_dir="")
    bundle = msgspec.structs.replace(
        bundle,
        model_dir="",
        tokenizer_dir="",
        adapters=dict.fromkeys(bundle.adapters, ""),
        chat_templates=dict.fromkeys(bundle.chat_templates, ""),
        weight_bytes=0,
        draft=draft,
    )
    name = "" if os.path.isabs(entity.entity_name) else entity.entity_name
    source = msgspec.structs.replace(entity.source, bundle=bundle)
    return msgspec.structs.replace(entity, entity_name=name, asked="", source=source)


def with_labels(config: EndpointConfig) -> EndpointConfig:
    """Return ``config`` with labels in place of URIs, which earlier releases took for the names of entities that a
    command line declared."""
    labels = {one.name: label for one in config.served_entities if (label := _label(one)) != one.name}
    if not labels:
        return config

    def renamed(route: Route) -> Route:
        name = route.served_model_name
        return msgspec.structs.replace(route, served_model_name=labels.get(name, name))

    return msgspec.structs.replace(
        config,
        served_entities=tuple(
            msgspec.structs.replace(
                one,
                name=labels.get(one.name, one.name),
                canary_of=None if one.canary_of is None else labels.get(one.canary_of, one.canary_of),
                asked=one.canary_of or one.name if one.name in labels else one.asked,
            )
            for one in config.served_entities
        ),
        routes=tuple(map(renamed, config.routes)),
    )


def _label(entity: EntityConfig) -> str:
    """Return the name of an entity as command lines declare it now; of a canary, with its own end."""
    if entity.canary_of is not None:
        return label_of(entity.canary_of) + entity.name.removeprefix(entity.canary_of)
    return label_of(entity.name)


def config_to_wire(config: EndpointConfig) -> dict[str, Any]:
    """Return the configuration in the API's form, with both spellings of entities and both names in a route, since
    clients read either. An entity has the version that was asked for, and the one that was found."""
    entities = [
        {
            key: value
            for key, value in msgspec.to_builtins(entity).items()
            if value not in (None, {}) and key not in ("source", "follow_alias", "canary", "asked")
        }
        | ({"follow_alias": True} if entity.follow_alias else {})
        | ({"canary": msgspec.to_builtins(entity.canary)} if entity.canary is not None else {})
        | _found(entity.source)
        for entity in config.served_entities
    ]
    models = [
        {"name": e.name, "model_name": e.entity_name, "model_version": e.entity_version} for e in config.served_entities
    ]
    routes = [
        {
            "served_model_name": route.served_model_name,
            "served_entity_name": route.served_model_name,
            "traffic_percentage": route.traffic_percentage,
        }
        for route in config.routes
    ]
    traffic: dict[str, Any] = {"routes": routes} | ({"sticky": True} if config.sticky else {})
    sharing = {} if config.prefix_sharing is None else {"prefix_sharing": config.prefix_sharing}
    log = {} if config.payload_log is None else {"payload_log": msgspec.to_builtins(config.payload_log)}
    rules = {} if config.guardrails is None else {"guardrails": shown(config.guardrails)}
    return (
        {"served_entities": entities, "served_models": models, "traffic_config": traffic}
        | sharing
        | log
        | rules
        | config.dialects.given()
    )


def _found(source: ModelSource | None) -> dict[str, Any]:
    """Return what an entity shows of the model that was found for it."""
    if source is None:
        return {}
    found = source.identity
    shown = {
        "resolved_name": found.name,
        "resolved_version": found.version,
        "content_hash": found.content_hash,
        "request_defaults": source.defaults,
    }
    return {name: value for name, value in shown.items() if value}
