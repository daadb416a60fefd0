"""``mlflow-llm engines``: the hosts that have joined a server's database to run engines, and what runs on them."""

from __future__ import annotations

import json
from typing import Any

import click

from ...http.management.paths import ENGINE_HOSTS
from ..http import Client, url_options
from .listing import table

HEADS = ("HOST", "STATE", "MEMORY", "CPUS", "GPUS", "ENGINE", "ENGINE STATE", "ADDRESS OR REASON")


@click.command()
@url_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def engines(url: str, key: str | None, as_json: bool) -> None:
    """List the hosts that have joined to run engines.

    They join with `mlflow-llm engine --join`, or a cluster's runtime starts them. Each has a line for every engine that
    a server has placed on it.
    """
    client = Client(url, key)
    found = client.get(ENGINE_HOSTS)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    with client.understood():
        rows = [row for host in found["hosts"] for row in _rows(host)]
    table([HEADS, *rows])


def _rows(host: dict[str, Any]) -> list[tuple[str, ...]]:
    gpus = ", ".join(one["name"] for one in host["devices"]) or "-"
    shown = (host["name"], host["state"].lower(), f"{host['memory'] / 2**30:.1f} GiB", str(host["cpus"]), gpus)
    engines = [
        (one["model"], one["state"].lower(), one.get("message") or one.get("address", "-")) for one in host["engines"]
    ] or [("-", "-", host.get("message", "-"))]
    return [(*(("",) * len(shown) if place else shown), *engine) for place, engine in enumerate(engines)]
