"""``mlflow-llm endpoints``: what a server serves."""

from __future__ import annotations

import json
from typing import Any

import click

from .http import Client, url_options

HEADS = ("NAME", "TASK", "MODEL", "CONTEXT", "STATUS", "RUNNING", "WAITING")


@click.command()
@url_options
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def endpoints(url: str, key: str | None, as_json: bool) -> None:
    """List endpoints, adapters and their load."""
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


def _states(client: Client) -> dict[str, Any]:
    try:
        found: dict[str, Any] = client.get("/health")["endpoints"]
    except click.ClickException:  # 503: an engine stands still, and says no more here
        return {}
    return found


def _load(name: str, tasks: dict[str, str], states: dict[str, Any]) -> dict[str, Any]:
    """What an endpoint does, and how it is; an engine that stands still does not say what it runs."""
    state = states.get(name, {"status": "unhealthy", "running": None, "waiting": None})
    load = {key: state[key] for key in ("status", "running", "waiting")}
    return {"task": tasks.get(name, "").removeprefix("llm/v1/"), **load}


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    """An adapter's row leaves out what its endpoint's says."""
    if "parent" in model:
        return (f"  {model['id']}", "", "", "", "", "", "")
    counts = ("?" if model[key] is None else str(model[key]) for key in ("running", "waiting"))
    return (model["id"], model["task"], model["root"], str(model["max_model_len"]), model["status"], *counts)


def table(rows: list[tuple[str, ...]]) -> None:
    """Print rows in columns as wide as their widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
