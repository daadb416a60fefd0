"""The configuration of an endpoint as the Databricks management API sends it: parsed once, every field checked."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any

import msgspec
from msgspec import Struct

from ..errors import InvalidField
from ..settings import EngineSettings, check_name, check_server_engine
from .body_fields import named, read_list, read_object
from .provisioned import check_throughput
from .source import Source

ENTITY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,254}")
URI = re.compile(r"(models|runs):/+[^/\x00].{0,500}|/[^\x00]{1,1000}")
VERSION = re.compile(r"[0-9]{1,18}|@?[A-Za-z0-9_-]{1,255}")
MAX_ENTITIES = 32


class ServedEntity(Struct, frozen=True, kw_only=True):
    """A registry model and version (or ``@alias``), or a URI or directory, which has no version.

    With ``max_provisioned_throughput`` it is provisioned, tokens/s. ``engine_settings`` replace those saved with the
    model. ``source`` is the model that was found; it is stored, and never shown.
    """

    name: str
    entity_name: str
    entity_version: str
    min_provisioned_throughput: int | None = None
    max_provisioned_throughput: int | None = None
    scale_to_zero_enabled: bool = False
    engine_settings: dict[str, Any] = {}
    source: Source | None = None

    @property
    def uri(self) -> str:
        """What MLflow fetches the model by."""
        if not self.entity_version:
            return self.entity_name
        number = self.entity_version.isdecimal()
        return f"models:/{self.entity_name}{'/' if number else '@'}{self.entity_version.removeprefix('@')}"

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
    served_model_name: str
    traffic_percentage: int


class EndpointConfig(Struct, frozen=True, kw_only=True):
    """``sticky``: a caller with an API key stays with the served entity that the key falls to. ``profile`` names the
    defaults and limits of its requests; None is the server's own."""

    served_entities: tuple[ServedEntity, ...]
    routes: tuple[Route, ...]
    sticky: bool = False
    profile: str | None = None


_ENTITY_FIELDS = {
    "name",
    "entity_name",
    "entity_version",
    "min_provisioned_throughput",
    "max_provisioned_throughput",
    "scale_to_zero_enabled",
    "workload_size",
    "workload_type",
    "environment_vars",
    "engine_settings",
}


def parse_config(body: Any) -> EndpointConfig:
    """``{"served_entities": […], "traffic_config": {"routes": […]}}`` to a config. Raises ``InvalidField``.

    ``served_models`` (``model_name``, ``model_version``) is the older spelling and read the same. Without routes
    a single entity gets all traffic. Errors have the newer spelling; see ``as_written``.
    """
    body = read_object(body, "", {"served_entities", "served_models", "traffic_config", "name"})
    field, listed = "served_entities", body.get("served_entities")
    if _is_older(body):
        listed = [_modern(item) for item in read_list(body["served_models"], field)]
    listed = read_list(listed, field)
    if not 1 <= len(listed) <= MAX_ENTITIES:
        raise InvalidField(field, len(listed), f"1 to {MAX_ENTITIES} entities")
    entities = tuple(_entity(item, f"{field}[{place}]") for place, item in enumerate(listed))
    names = [entity.name for entity in entities]
    for name in names:
        if names.count(name) > 1:
            raise InvalidField(f"{field}[].name", name, "a name that only one served entity has")
    routes, sticky = _traffic(body.get("traffic_config"), names)
    return EndpointConfig(served_entities=entities, routes=routes, sticky=sticky)


OLDER = {"served_entities": "served_models", "entity_name": "model_name", "entity_version": "model_version"}


def as_written(body: Any, parent: str) -> AbstractContextManager[None]:
    """Errors inside name fields of a config as ``body`` spells them; it stands at ``parent`` of the request."""
    return named(parent, OLDER if isinstance(body, dict) and _is_older(body) else {})


def _is_older(body: dict[str, Any]) -> bool:
    return body.get("served_entities") is None and body.get("served_models") is not None


def _modern(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    newer = {older: name for name, older in OLDER.items()}
    return {newer.get(key, key): value for key, value in item.items()}


def _entity(item: Any, field: str) -> ServedEntity:
    item = read_object(item, field, _ENTITY_FIELDS)
    for key in ("workload_type", "environment_vars"):
        if item.get(key) not in (None, {}, "CPU"):
            raise InvalidField(f"{field}.{key}", item[key], "no value: an entity runs on the server's own machine")
    if item.get("workload_size") not in (None, "Small", "Medium", "Large"):
        raise InvalidField(f"{field}.workload_size", item["workload_size"], '"Small", "Medium" or "Large"')
    entity_name, version = _model(item, field)
    name = item.get("name")
    if name is None:
        name = (
            re.sub(r"[^A-Za-z0-9_-]+", "-", f"{entity_name}-{version}".replace("@", "")).strip("-_")[-63:].strip("-_")
        )
    name = check_name(name, f"{field}.name")
    scale = item.get("scale_to_zero_enabled")
    if scale is not None and not isinstance(scale, bool):
        raise InvalidField(f"{field}.scale_to_zero_enabled", scale, "true or false")
    minimum, maximum = _throughput(item, field)
    return ServedEntity(
        name=name,
        entity_name=entity_name,
        entity_version=version,
        min_provisioned_throughput=minimum,
        max_provisioned_throughput=maximum,
        scale_to_zero_enabled=bool(scale),
        engine_settings=_engine_settings(item.get("engine_settings"), f"{field}.engine_settings"),
    )


def _model(item: dict[str, Any], field: str) -> tuple[str, str]:
    """Name and version; the version of a URI or directory is empty."""
    name, version = item.get("entity_name"), item.get("entity_version")
    if isinstance(name, str) and URI.fullmatch(name):
        if version not in (None, ""):
            raise InvalidField(f"{field}.entity_version", version, "none: a URI has no version beside it")
        return name, ""
    if not isinstance(name, str) or not ENTITY_NAME.fullmatch(name):
        raise InvalidField(f"{field}.entity_name", name, "the name of a registered model, or a model's URI")
    if isinstance(version, int) and not isinstance(version, bool):
        version = str(version)
    if not isinstance(version, str) or not VERSION.fullmatch(version):
        raise InvalidField(f"{field}.entity_version", version, "a version number or an alias")
    return name, version


def _engine_settings(value: Any, field: str) -> dict[str, Any]:
    """Settings of the engine that replace those saved with the model."""
    given = {} if value is None else read_object(value, field, set(EngineSettings.__struct_fields__))
    if given.get("trust_remote_code"):
        raise InvalidField(f"{field}.trust_remote_code", True, "false: it is granted on the server's command line only")
    check_server_engine(given, field)
    return given


def _throughput(item: dict[str, Any], field: str) -> tuple[int | None, int | None]:
    found: list[int | None] = []
    for key in ("min_provisioned_throughput", "max_provisioned_throughput"):
        value = item.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 10**9):
            raise InvalidField(f"{field}.{key}", value, "an integer number of tokens/s from 0 to 10**9")
        found.append(value)
    minimum, maximum = found
    if minimum is None and maximum is None:
        return None, None
    with named(field):
        check_throughput(minimum or 0, maximum)
    return minimum or 0, minimum if maximum is None else maximum


def _traffic(body: Any, names: list[str]) -> tuple[tuple[Route, ...], bool]:
    """Routes, and whether callers are sticky."""
    field = "traffic_config"
    body = {} if body is None else read_object(body, field, {"routes", "sticky"})
    sticky = body.get("sticky")
    if sticky is not None and not isinstance(sticky, bool):
        raise InvalidField(f"{field}.sticky", sticky, "true or false")
    return _routes(body.get("routes"), f"{field}.routes", names), bool(sticky)


def _routes(listed: Any, field: str, names: list[str]) -> tuple[Route, ...]:
    if listed is None:
        if len(names) > 1:
            raise InvalidField(field, None, "a traffic percentage for each of several served entities")
        return (Route(served_model_name=names[0], traffic_percentage=100),)
    listed = read_list(listed, field)
    routes = tuple(_route(item, f"{field}[{place}]", names) for place, item in enumerate(listed))
    if len({route.served_model_name for route in routes}) != len(routes):
        raise InvalidField(field, [route.served_model_name for route in routes], "one route for each served entity")
    total = sum(route.traffic_percentage for route in routes)
    if total != 100:
        raise InvalidField(field, total, "percentages that sum to 100")
    return routes


def _route(item: Any, field: str, names: list[str]) -> Route:
    either = ("served_model_name", "served_entity_name")
    item = read_object(item, field, {*either, "traffic_percentage"})
    key = next((key for key in either if key in item), either[0])
    name = item.get(key)
    if name not in names:
        raise InvalidField(f"{field}.{key}", name, "one of " + ", ".join(names))
    percentage = item.get("traffic_percentage")
    if not isinstance(percentage, int) or isinstance(percentage, bool) or not 0 <= percentage <= 100:
        raise InvalidField(f"{field}.traffic_percentage", percentage, "an integer from 0 to 100")
    return Route(served_model_name=name, traffic_percentage=percentage)


def parse_tags(listed: Any, field: str = "tags") -> dict[str, str]:
    """``[{"key": …, "value": …}]``; a missing value is empty."""
    tags: dict[str, str] = {}
    for place, item in enumerate(read_list(listed, field)):
        item = read_object(item, f"{field}[{place}]", {"key", "value"})
        key, value = item.get("key"), item.get("value")
        if not isinstance(key, str) or not 0 < len(key) <= 127:
            raise InvalidField(f"{field}[{place}].key", key, "a text of 1 to 127 characters")
        if value is not None and (not isinstance(value, str) or len(value) > 255):
            raise InvalidField(f"{field}[{place}].value", value, "a text of at most 255 characters")
        tags[key] = value or ""
    return tags


def parse_rate_limits(listed: Any) -> dict[tuple[str, str], int]:
    """``[{"calls": 100, "key": "endpoint", "renewal_period": "minute"}]`` to {(scope, kind): value}."""
    found: dict[tuple[str, str], int] = {}
    for place, item in enumerate(read_list(listed, "rate_limits")):
        field = f"rate_limits[{place}]"
        item = read_object(item, field, {"calls", "key", "renewal_period"})
        calls, key = item.get("calls"), item.get("key") or "endpoint"
        if not isinstance(calls, int) or isinstance(calls, bool) or not 0 <= calls <= 10**9:
            raise InvalidField(f"{field}.calls", calls, "an integer from 0 to 10**9")
        if key not in ("endpoint", "user"):
            raise InvalidField(f"{field}.key", key, '"endpoint" or "user"')
        if item.get("renewal_period") != "minute":
            raise InvalidField(f"{field}.renewal_period", item.get("renewal_period"), '"minute"')
        if (key, "qpm") in found:
            raise InvalidField(f"{field}.key", key, "one limit for each key")
        found[key, "qpm"] = calls
    return found


def config_to_wire(config: EndpointConfig) -> dict[str, Any]:
    """As the API returns it: both spellings of entities, both names in a route (clients read either)."""
    entities = [
        {
            key: value
            for key, value in msgspec.to_builtins(entity).items()
            if value not in (None, {}) and key != "source"
        }
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
    return {"served_entities": entities, "served_models": models, "traffic_config": traffic}
