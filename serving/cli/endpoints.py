"""``mlflow-llm endpoints``: what a server serves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

import click

from ..http.management.paths import SERVING_ENDPOINTS
from ..model_files.model_version import SHORT_HASH_DIGITS
from ..system.escape import visible_line
from .http import Client, url_options

REASONS = {
    "kernels_reason": "torch's kernels, not the native ones",
    "quantization_reason": "weights in fp8",
    "kv_cache_reason": "KV cache",
    "unloaded": "unloaded until a request comes",
}
RUNS_ON = ("kernels", "kernels_reason", "quantization", "kv_cache_dtype", "kv_cache_reason")
HEADS = ("NAME", "TASK", "MODEL", "VERSION", "CONTEXT", "KERNELS", "KV", "STATUS", "RUNNING", "WAITING")


@click.group(invoke_without_command=True)
@url_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def endpoints(context: click.Context, url: str, key: str | None, as_json: bool) -> None:
    """List endpoints, adapters and their load."""
    if context.invoked_subcommand is not None:
        return
    client = Client(url, key, timeout=30)
    with client.understood():
        models = client.get("/v1/models")["data"]
        tasks = {entry["name"]: entry["endpoint_type"] for entry in client.get("/api/2.0/endpoints/")["endpoints"]}
        states = _states(client)
        found = [model if "parent" in model else model | _load(model["id"], tasks, states) for model in models]
        rows = [HEADS, *map(_row, found)]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    table(rows)
    for name, reason in _reasons(states):
        click.echo(f"{visible_line(name)}: {visible_line(reason)}", err=True)


@endpoints.command("give-back")
@url_options
@click.argument("name")
def give_back(url: str, key: str | None, name: str) -> None:
    """Go back to the config of endpoint NAME that the servers' command lines declare.

    A config that was set over the API stays, whatever server is started with -m, until it is given back.
    """
    client = Client(url, key, timeout=30)
    with client.understood():
        state = client.delete(f"{SERVING_ENDPOINTS}/{quote(name, safe='')}/config")["state"]
    click.echo(f"{visible_line(name)}: {state['config_update']}")


def _reasons(states: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (endpoint or its served entity, why it does not run on our kernels, or keeps more than it could)."""
    found = []
    for name, state in states.items():
        each = {f"{name}/{entity}": one for entity, one in state.get("entities", {}).items()} or {name: state}
        for place, one in each.items():
            found += [(place, f"{text}: {one[key]}") for key, text in REASONS.items() if one.get(key)]
    return found


def _states(client: Client) -> dict[str, Any]:
    try:
        found: dict[str, Any] = client.get("/health")["endpoints"]
    except click.ClickException:  # 503: an engine stands still, and says no more here
        return {}
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
    named = (model["id"], model["task"], entities, _versions(model), str(model["max_model_len"]))
    besides = f", {model['standbys']} standby" if "standbys" in model else ""
    besides += ", unloaded" if "unloaded" in model else ""
    kernels = " ".join(filter(None, (model["kernels"] or "?", model["quantization"])))
    return (*named, kernels, model["kv_cache_dtype"] or "-", f"{model['status']}{besides}", *counts)


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
