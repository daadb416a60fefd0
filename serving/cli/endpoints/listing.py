"""The table of endpoints: what each serves, how it runs, and how busy it is."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import click

from ...model_files.model_version import SHORT_HASH_DIGITS
from ...system.escape import visible_line
from ..http import Client
from .server_state import Sample, managed, sample, states

REASONS = {
    "kernels_reason": "torch's kernels, not the native ones",
    "quantization_reason": "weights in fp8",
    "kv_cache_reason": "KV cache",
    "unloaded": "unloaded until a request comes",
}
READING_SECONDS = 1.0  # between the two readings of counters that give tokens a second
RUNS_ON = ("kernels", "kernels_reason", "quantization", "kv_cache_dtype", "kv_cache_reason")
HEADS = (
    "NAME",
    "TASK",
    "MODEL",
    "VERSION",
    "CONTEXT",
    "KERNELS",
    "KV",
    "STATUS",
    "RUNNING",
    "WAITING",
    "REPLICAS",
    "TOKENS/S",
    "SPLIT",
)


def listed(client: Client) -> tuple[list[dict[str, Any]], list[str]]:
    """Return endpoints and adapters with their load, and sentences about what is not as it should be.

    Raises ``ClickException``.
    """
    first = sample(client)
    with client.understood():
        models = client.get("/v1/models")["data"]
        tasks = {entry["name"]: entry["endpoint_type"] for entry in client.get("/api/2.0/endpoints/")["endpoints"]}
        found_states, configs = states(client), managed(client)
        busy = any(state.get("running") for state in found_states.values())
        if busy and not first.refused:
            time.sleep(READING_SECONDS)
        last = sample(client) if busy else first
        found = [model if "parent" in model else model | _load(model["id"], tasks, found_states) for model in models]
        for one in found:
            if "parent" not in one:
                one |= _of_config(configs.get(one["id"])) | _numbers(one["id"], first, last)
        there = {one["id"] for one in found}
        found += [_not_served(name, config) for name, config in configs.items() if name not in there]
        told = [f"{name}: {reason}" for name, reason in (*_reasons(found_states), *_updates(configs))]
    if last.refused:
        told.append(f"replicas and tokens/s are not known: {last.refused}")
    return found, told


def show(found: list[dict[str, Any]], told: list[str]) -> None:
    """Print the table, and the sentences below it on standard error."""
    table([HEADS, *map(_row, found)])
    for sentence in told:
        click.echo(visible_line(sentence), err=True)


def _of_config(endpoint: dict[str, Any] | None) -> dict[str, Any]:
    """Return traffic split and state of an endpoint of the management API."""
    if endpoint is None:
        return {}
    shown: dict[str, Any] = {"state": endpoint["state"]}
    if len(endpoint.get("gateways", ())) > 1:  # older servers do not show them
        shown["gateways"] = endpoint["gateways"]
    if "config" in endpoint:
        routes = endpoint["config"]["traffic_config"]["routes"]
        shown["split"] = {route["served_model_name"]: route["traffic_percentage"] for route in routes}
        shown["config_version"] = endpoint["config"]["config_version"]
    return shown


def _numbers(name: str, first: Sample, last: Sample) -> dict[str, Any]:
    """Return how many replicas an endpoint has, and how many tokens it generates a second."""
    places = [place for place in last.engines if place[0] == name]
    if not places:
        return {"replicas": None, "tokens_per_second": None}
    rates = [last.rate(first, place) or 0.0 for place in places]
    replicas = int(sum(last.engines[place]["replicas"] for place in places))
    return {"replicas": replicas, "tokens_per_second": round(sum(rates), 1)}


def _not_served(name: str, endpoint: dict[str, Any]) -> dict[str, Any]:
    """Return an endpoint that no worker serves, such as one whose first config is not ready yet."""
    shown = dict.fromkeys(("root", "max_model_len", "running", "waiting", "replicas", "tokens_per_second"))
    config = endpoint.get("config") or endpoint.get("pending_config") or {}
    entities = [entity["name"] for entity in config.get("served_entities", [])]
    about = {"id": name, "entities": entities, "task": str(endpoint.get("task", "")).removeprefix("llm/v1/")}
    return (
        shown
        | about
        | {"status": _state(endpoint), "kernels": "", "quantization": "", "kv_cache_dtype": ""}
        | (_of_config(endpoint))
    )


def _state(endpoint: dict[str, Any]) -> str:
    return "starting" if endpoint["state"]["config_update"] == "IN_PROGRESS" else "not ready"


def _updates(configs: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (endpoint, what became of its last update, or which gateways or hosts lack it) for those that are not
    well."""
    found = []
    for name, endpoint in configs.items():
        update, message = endpoint["state"]["config_update"], endpoint["state"].get("message", "")
        if update == "UPDATE_FAILED":
            found.append((name, f"the last update failed: {message or 'the key may not see why'}"))
        elif update == "IN_PROGRESS":
            version = endpoint.get("pending_config", {}).get("config_version")
            found.append((name, f"an update{f' to version {version}' if version else ''} is in progress"))
        elif endpoint["state"]["ready"] != "READY" and message:
            found.append((name, message))
        for one in endpoint.get("hosts", ()):
            if one["state"] != "READY":
                said = ": ".join(filter(None, (one["state"].lower(), one.get("message", ""))))
                found.append((name, f"{one['served_entity']} on host {one['host']}: {said}"))
        gateways = endpoint.get("gateways", ())
        if len(gateways) > 1 and any(one["state"] != "READY" for one in gateways):
            found += [(name, f"gateway {one['gateway']}: {_of_gateway(one)}") for one in gateways]
    return found


def _of_gateway(one: dict[str, Any]) -> str:
    """Describe what a gateway serves: ``"serves version 3"``, ``"failed, serves version 2: no memory"``."""
    version = one.get("config_version")
    words = {"READY": "", "NOT_READY": "not ready", "LOADING": "loading", "STARTING": "starting", "FAILED": "failed"}
    serves = "serves nothing of it" if version is None else f"serves version {version}"
    said = ", ".join(filter(None, (words.get(one["state"], one["state"]), serves)))
    return ": ".join(filter(None, (said, one.get("message", ""))))


def _reasons(states: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (endpoint or its served entity, why it does not run on our kernels, or keeps more than it could)."""
    found = []
    for name, state in states.items():
        each = {f"{name}/{entity}": one for entity, one in state.get("entities", {}).items()} or {name: state}
        for place, one in each.items():
            found += [(place, f"{text}: {one[key]}") for key, text in REASONS.items() if one.get(key)]
    return found


def _load(name: str, tasks: dict[str, str], states: dict[str, Any]) -> dict[str, Any]:
    """Return an endpoint's status and load; a hanging engine does not report its load."""
    state = states.get(name, {"status": "unhealthy", "running": None, "waiting": None})
    load = {key: state.get(key) for key in ("status", "running", "waiting")}
    entities = state.get("entities", {})
    if entities:
        load["entities"] = list(entities)  # beside ``root``, which names the first alone
    parts = [state, *entities.values()]
    if standbys := [part["standbys"] for part in parts if "standbys" in part]:
        load["standbys"] = sum(standbys)
    if away := _joined(part.get("unloaded") for part in parts):
        load["unloaded"] = away
    load |= {key: _joined(part.get(key) for part in parts) for key in RUNS_ON}
    return {"task": tasks.get(name, "").removeprefix("llm/v1/"), **load}


def _joined(values: Iterable[str | None]) -> str:
    return ", ".join(dict.fromkeys(value for value in values if value))


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    """Return a table row; an adapter's leaves out what its endpoint's says."""
    if "parent" in model:
        return (f"  {model['id']}", *[""] * (len(HEADS) - 1))
    counts = ("?" if model[key] is None else str(model[key]) for key in ("running", "waiting"))
    entities = ", ".join(model.get("entities", [model["root"]]))
    named = (model["id"], model["task"], entities, _versions(model), str(model["max_model_len"] or "-"))
    besides = f", {model['standbys']} standby" if "standbys" in model else ""
    besides += ", unloaded" if "unloaded" in model else ""
    kernels = " ".join(filter(None, (model["kernels"] or "?", model["quantization"])))
    state = model.get("state", {}).get("config_update", "")
    if gateways := model.get("gateways"):
        besides += f", {sum(one['state'] == 'READY' for one in gateways)} of {len(gateways)} gateways"
    besides += {"UPDATE_FAILED": ", update failed", "IN_PROGRESS": ", updating"}.get(state, "")
    status = f"{model['status']}{besides}"
    return (*named, kernels, model["kv_cache_dtype"] or "-", status, *counts, *_shares(model))


def _shares(model: dict[str, Any]) -> tuple[str, str, str]:
    """Return replicas, tokens a second and the traffic split of an endpoint."""
    split = model.get("split", {})
    shown = ", ".join(f"{name} {share} %" for name, share in split.items()) if len(split) > 1 else "-"
    numbers = ("-" if model.get(key) is None else str(model[key]) for key in ("replicas", "tokens_per_second"))
    return (*numbers, shown)  # type: ignore[return-value]


def _versions(model: dict[str, Any]) -> str:
    """Return the version of each served model in the registry, if it has one, and the beginning of its content hash."""
    found = model.get("served_models", [])  # which older servers do not show
    parts = ([one.get("model_version"), one.get("content_hash", "")[:SHORT_HASH_DIGITS]] for one in found)
    return ", ".join(" ".join(filter(None, pair)) for pair in parts) or "-"


def table(rows: list[tuple[str, ...]]) -> None:
    """Print rows in columns as wide as their widest cell."""
    rows = [tuple(map(visible_line, row)) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
