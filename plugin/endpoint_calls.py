"""Endpoints of a running server, through its management API."""

from __future__ import annotations

import json
import os
import time
from typing import Any
from urllib.parse import quote

import msgspec
from mlflow.exceptions import MlflowException

from mlflow_llm.serving.settings import EngineSettings

from . import calls

API = "/api/2.0/serving-endpoints"
ENTITY_KEYS = ("min_provisioned_throughput", "max_provisioned_throughput", "scale_to_zero_enabled")
ENGINE_KEYS = tuple(EngineSettings.__struct_fields__)
UPDATE_SECONDS = 1200.0
TURN = 0.2


def create(server: str, name: str, model_uri: str, config: dict[str, Any]) -> dict[str, Any]:
    """Create endpoint ``name`` and wait until it is ready. Raises ``MlflowException`` where it fails; none is left."""
    calls.ask("POST", server + API, {"name": name, "config": config_of(model_uri, config)})
    try:
        return await_config(server, name)
    except MlflowException:
        delete(server, name)
        raise


def update(server: str, name: str, model_uri: str, config: dict[str, Any]) -> dict[str, Any]:
    """Roll over to a new config and wait for it. Raises ``MlflowException`` where it fails; the old one serves on."""
    calls.ask("PUT", f"{server}{API}/{quote(name, safe='')}/config", config_of(model_uri, config))
    return await_config(server, name)


def delete(server: str, name: str) -> None:
    calls.ask("DELETE", f"{server}{API}/{quote(name, safe='')}")


def get(server: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = calls.ask("GET", f"{server}{API}/{quote(name, safe='')}").json()
    return found


def list_all(server: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = calls.ask("GET", server + API).json()["endpoints"]
    return found


def await_config(server: str, name: str) -> dict[str, Any]:
    """The endpoint once no update of it is in progress. Raises ``MlflowException`` where the update failed."""
    until = time.monotonic() + UPDATE_SECONDS
    while time.monotonic() < until:
        found = get(server, name)
        state = found["state"]
        if state["config_update"] == "UPDATE_FAILED":
            raise MlflowException(f"endpoint {name!r} did not take the model: {state.get('message', 'no message')}")
        if state["config_update"] == "NOT_UPDATING":
            return found
        time.sleep(TURN)
    raise MlflowException(f"endpoint {name!r} was not ready within {UPDATE_SECONDS:.0f} seconds")


def config_of(model_uri: str, config: dict[str, Any]) -> dict[str, Any]:
    """An endpoint's config of one model. ``config`` holds engine settings and ``ENTITY_KEYS``, texts as the command
    line gives them among its values."""
    entity: dict[str, Any] = entity_of(model_uri)
    settings = {}
    for key, value in config.items():
        if key in ENTITY_KEYS:
            entity[key] = parsed(value)
        elif key in ENGINE_KEYS:
            settings[key] = parsed(value)
        else:
            allowed = ", ".join((*ENTITY_KEYS, *ENGINE_KEYS))
            raise MlflowException.invalid_parameter_value(f"config: {key!r} cannot be set here; expected {allowed}")
    return {"served_entities": [entity | ({"engine_settings": settings} if settings else {})]}


def entity_of(model_uri: str) -> dict[str, Any]:
    """``models:/name/version`` and ``models:/name@alias`` by name and version; a directory or another URI as it is."""
    path = model_uri.removeprefix("models:").lstrip("/")
    if model_uri.startswith("models:") and "@" in path:
        name, alias = path.rsplit("@", 1)
        return {"entity_name": name, "entity_version": f"@{alias}"}
    if model_uri.startswith("models:") and path.count("/") == 1 and path.rsplit("/", 1)[1].isdecimal():
        name, version = path.rsplit("/", 1)
        return {"entity_name": name, "entity_version": version}
    is_path = ":" not in model_uri.split("/")[0]
    return {"entity_name": os.path.abspath(model_uri) if is_path else model_uri}


def uri_of(entity: dict[str, Any]) -> str:
    """The model that a served entity of an endpoint's config names."""
    name, version = entity["entity_name"], entity.get("entity_version") or ""
    if not version:
        return str(name)
    return f"models:/{name}/{version}" if version.isdecimal() else f"models:/{name}@{version.removeprefix('@')}"


def parsed(value: Any) -> Any:
    """A text as JSON where it reads as such (``4``, ``true``), else itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def differing(old: dict[str, Any], new: dict[str, Any], keys: tuple[str, ...]) -> list[str]:
    """Which of ``keys`` have another value in ``new`` than in ``old``, however it is written."""
    return [key for key in keys if key in new and _plain(parsed(new[key])) != _plain(parsed(old.get(key)))]


def _plain(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")
