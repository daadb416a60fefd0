"""The engines of a server at a moment: a row for each served entity, for ``mlflow-llm top``."""

from __future__ import annotations

from collections import Counter
from typing import Any
from urllib.parse import urlencode

import click

from ...http.management.paths import USAGE
from ...system.escape import visible_line
from ..http import Client
from ..store import table
from .exposition import EngineNumbers, Place
from .server_state import Sample, sample, states

HEADS = (
    "ENDPOINT", "ENTITY", "STATE", "REPLICAS", "BATCH", "WAITING", "KV", "PREFIX HITS", "PREFILL/S", "DECODE/S",
    "MEMORY", "ADAPTERS",
)  # fmt: skip
OPEN_PAGE = 10_000


def engines(client: Client, before: Sample | None) -> tuple[dict[str, Any], Sample]:
    """Return the state of all engines, with rates since ``before``, and the sample that it was read from.

    Raises ``ClickException``.
    """
    with client.understood():
        health, now = states(client), sample(client)
        models = client.get("/v1/models")["data"]
        rows = [
            _row(place, state, now, before or now, _adapters(models, place))
            for name, endpoint in sorted(health.items())
            for place, state in _entities(name, endpoint, models)
        ]
        found: dict[str, Any] = {"engines": rows, "open_requests": _open_requests(client)}
    return found | ({"not_known": now.refused} if now.refused else {}), now


def _entities(name: str, endpoint: dict[str, Any], models: list[dict[str, Any]]) -> list[tuple[Place, dict[str, Any]]]:
    """Return the entities of an endpoint, each with its health; of a single one, the health is the endpoint's."""
    several = endpoint.get("entities", {})
    if several:
        return [((name, entity), state) for entity, state in several.items()]
    root = next((model["root"] for model in models if model["id"] == name), name)
    return [((name, root), endpoint)]


def _adapters(models: list[dict[str, Any]], place: Place) -> list[str]:
    return [model["id"].partition(":")[2] for model in models if model.get("parent") == place[0]]


def _row(place: Place, state: dict[str, Any], now: Sample, before: Sample, adapters: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"endpoint": place[0], "entity": place[1], "state": state["status"], "adapters": adapters}
    row |= {"running": state.get("running"), "waiting": state.get("waiting"), "memory": state.get("memory")}
    if state.get("unloaded"):
        row["unloaded"] = state["unloaded"]
    numbers = now.engines.get(place)
    if numbers is None:
        return row
    row |= {name: int(numbers[name]) for name in ("replicas", "kv_tokens_used", "kv_tokens_total", "waiting_tenants")}
    row["memory"] = row["memory"] or int(numbers["engine_memory_bytes"]) or None
    row["prefix_hit_rate"] = _hit_rate(numbers, before.engines.get(place))
    row["prefill_tokens_per_second"] = _rounded(now.prefill_rate(before, place))
    row["decode_tokens_per_second"] = _rounded(now.rate(before, place))
    used = Counter[str]()
    for (adapter, kind), count in numbers.tokens.items():
        used[adapter] += int(count) * (kind == "completion")
    row["completion_tokens_by_adapter"] = dict(sorted(used.items()))
    return row


def _hit_rate(now: EngineNumbers, before: EngineNumbers | None) -> float | None:
    """Return the share of prompt tokens that the prefix cache held: since ``before`` or, without prompts, so far."""
    hits, queries = now["prefix_hit_tokens"], now["prefix_query_tokens"]
    if before is not None and queries > before["prefix_query_tokens"]:
        hits, queries = hits - before["prefix_hit_tokens"], queries - before["prefix_query_tokens"]
    return round(max(0.0, hits) / queries, 4) if queries else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _open_requests(client: Client) -> dict[str, int] | str:
    """Return how many requests of each tenant run or wait, as the ledger has them, or why that is not known."""
    try:
        rows = client.get(f"{USAGE}?{urlencode({'status': 'open', 'limit': OPEN_PAGE})}")["usage"]
    except click.ClickException as error:
        return error.message
    return dict(Counter(row["tenant"] for row in rows).most_common())


def lines(found: dict[str, Any]) -> list[str]:
    """Return the engines as lines of a table, and what is below it."""
    shown = table(HEADS, [_cells(row) for row in found["engines"]], right=0).splitlines()
    opened = found["open_requests"]
    if isinstance(opened, str):
        told = f"not known: {opened}"
    else:
        told = ", ".join(f"{tenant} {count}" for tenant, count in opened.items()) or "none"
    shown.append(visible_line(f"open requests by tenant: {told}"))
    if "not_known" in found:
        shown.append(visible_line(f"the other columns are not known: {found['not_known']}"))
    return shown


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    waiting = _shown(row["waiting"])
    if row.get("waiting_tenants", 0) > 1:
        waiting += f" of {row['waiting_tenants']} tenants"
    total = row.get("kv_tokens_total")
    kv = f"{100 * row['kv_tokens_used'] / total:.0f} % of {total}" if total else "-"
    rate = row.get("prefix_hit_rate")
    adapters = ", ".join(
        f"{name} {row['completion_tokens_by_adapter'].get(name, 0)}" if "completion_tokens_by_adapter" in row else name
        for name in row["adapters"]
    )
    return (
        row["endpoint"],
        row["entity"],
        row["state"] + (", unloaded" if "unloaded" in row else ""),
        _shown(row.get("replicas")),
        _shown(row["running"]),
        waiting,
        kv,
        "-" if rate is None else f"{100 * rate:.0f} %",
        _shown(row.get("prefill_tokens_per_second")),
        _shown(row.get("decode_tokens_per_second")),
        "-" if not row["memory"] else f"{row['memory'] / 2**20:.0f} MiB",
        adapters or "-",
    )


def _shown(value: float | None) -> str:
    return "-" if value is None else str(value)
