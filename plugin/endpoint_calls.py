"""Manage the endpoints of a running server through its management API."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

import msgspec
from mlflow.exceptions import MlflowException

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.model_files.model_uri import by_version, parse

from . import http_calls
from .model_uris import absolute

API = "/api/2.0/serving-endpoints"
ENTITY_KEYS = ("min_provisioned_throughput", "max_provisioned_throughput", "scale_to_zero_enabled")
ENGINE_KEYS = tuple(EngineSettings.__struct_fields__)
UPDATE_SECONDS = 1200.0
CHECK_SECONDS = 0.2


def create(server: str, name: str, model_uri: str, config: dict[str, Any]) -> dict[str, Any]:
    """Create endpoint ``name`` and wait until it is ready.

    Raises ``MlflowException`` if that fails; no endpoint is left behind.
    """
    http_calls.request("POST", server + API, {"name": name, "config": config_of(model_uri, config)})
    try:
        return await_config(server, name)
    except MlflowException:
        delete(server, name)
        raise


def update(server: str, name: str, model_uri: str, config: dict[str, Any]) -> dict[str, Any]:
    """Roll over to a new config and wait until it serves.

    Raises ``MlflowException`` if that fails; the old config keeps serving.
    """
    http_calls.request("PUT", f"{server}{API}/{quote(name, safe='')}/config", config_of(model_uri, config))
    return await_config(server, name)


def delete(server: str, name: str) -> None:
    http_calls.request("DELETE", f"{server}{API}/{quote(name, safe='')}")


def get(server: str, name: str, *, seconds: float = http_calls.TIMEOUT_SECONDS) -> dict[str, Any]:
    url = f"{server}{API}/{quote(name, safe='')}"
    return _endpoint(http_calls.request_json("GET", url, seconds=seconds), url)


def list_all(server: str) -> list[dict[str, Any]]:
    listed = http_calls.request_json("GET", server + API).get("endpoints")
    return [_endpoint(one, server + API) for one in _checked(listed, list, server + API)]


def _endpoint(found: Any, url: str) -> dict[str, Any]:
    """Check that ``found`` has the fields of an endpoint that are read here. Raises ``MlflowException``."""
    endpoint: dict[str, Any] = _checked(found, dict, url)
    _checked(endpoint.get("name"), str, url)
    _checked(_checked(endpoint.get("state"), dict, url).get("config_update"), str, url)
    for entity in entities(endpoint):
        _checked(entity.get("entity_name"), str, url)
    return endpoint


def _checked(value: Any, kind: type, url: str) -> Any:
    if not isinstance(value, kind):
        raise http_calls.unexpected_answer(url)
    return value


def entities(endpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the served entities of an endpoint; there are none before its first config is ready."""
    found: list[dict[str, Any]] = endpoint.get("config", {}).get("served_entities", [])
    return found


def settings_of(entity: dict[str, Any]) -> dict[str, Any]:
    """Return the config from which ``config_of`` would build ``entity``."""
    own = {key: entity[key] for key in ENTITY_KEYS if entity.get(key) not in (None, False)}
    return own | entity.get("engine_settings", {})


def await_config(server: str, name: str) -> dict[str, Any]:
    """Return the endpoint once no update is in progress. Raises ``MlflowException`` if the update failed."""
    until = time.monotonic() + UPDATE_SECONDS
    while time.monotonic() < until:
        found = get(server, name)
        state = found["state"]
        if state["config_update"] == "UPDATE_FAILED":
            raise MlflowException(f"endpoint {name!r} did not take the model: {state.get('message', 'no message')}")
        if state["config_update"] == "NOT_UPDATING":
            return found
        time.sleep(CHECK_SECONDS)
    raise MlflowException(f"endpoint {name!r} was not ready within {UPDATE_SECONDS:.0f} seconds")


def config_of(model_uri: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the API's config of an endpoint with one model. Raises ``MlflowException``.

    ``config`` holds engine settings and ``ENTITY_KEYS``; values may be strings, as given on the command line.
    """
    entity: dict[str, Any] = entity_of(model_uri)
    settings = {}
    for key, value in config.items():
        if key in ENTITY_KEYS:
            entity[key] = parsed(value)
        elif key in ENGINE_KEYS:
            settings[key] = parsed(value)
        else:
            allowed = ", ".join((*ENTITY_KEYS, *ENGINE_KEYS))
            if key in ServerSettings.__struct_fields__:
                allowed = f"it where the server is started (`mlflow-llm serve`); here {allowed}"
            raise MlflowException.invalid_parameter_value(f"config: {key!r} cannot be set here; expected {allowed}")
    return {"served_entities": [entity | ({"engine_settings": settings} if settings else {})]}


def entity_of(model_uri: str) -> dict[str, Any]:
    """Return the API's fields for a model: name and version for ``models:/name/version`` or ``models:/name@alias``; a
    directory or another URI unchanged."""
    named = parse(model_uri)
    if named is not None and named.alias is not None:
        return {"entity_name": named.name, "entity_version": f"@{named.alias}"}
    if named is not None and named.version is not None and named.version.isdecimal():
        return {"entity_name": named.name, "entity_version": named.version}
    return {"entity_name": absolute(model_uri)}


def uri_of(entity: dict[str, Any]) -> str:
    """Return the URI of the model that a served entity of an endpoint's config names."""
    name, version = entity["entity_name"], entity.get("entity_version") or ""
    return by_version(name, version).uri if version else str(name)


def parsed(value: Any) -> Any:
    """Parse a string that is JSON (``4``, ``true``); return any other ``value`` unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return value
