"""Endpoints in the form in which the Databricks management API returns them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, get_args

import msgspec
import sqlalchemy as sa

from ..interface.request import Task
from ..metering.accounts.authorization import Caller
from ..metering.store.tables import endpoint_tags, limits
from .config import EndpointConfig, config_to_wire
from .engine_hosts import EngineHost, HostedEngine, Placed, placement_key
from .gateways import EndpointReport, Gateway
from .rows import is_operators

_TASK_NAMES = {task: f"llm/v1/{task}" for task in get_args(Task)}


def endpoint_to_wire(connection: sa.Connection, row: sa.Row, config: Callable[[int], EndpointConfig]) -> dict[str, Any]:
    """Return the full view of the endpoint ``row``; ``config(version)`` reads a stored config."""
    body: dict[str, Any] = {
        "name": row.name,
        "id": row.id,
        "creator": row.creator,
        "creation_timestamp": row.created_ms,
        "last_updated_timestamp": row.updated_ms,
        "description": row.description,
        "state": {"ready": row.ready, "config_update": row.config_update},
        "tags": tags_to_wire(connection, row.name),
        "task": task_name(tuple(row.tasks.split())),
        "permission_level": "CAN_MANAGE",  # other callers get the brief view
    }
    if row.active_version is not None:
        message = "" if row.ready == "READY" else row.message
        body["config"] = _config(config(row.active_version), row.active_version, row.ready == "READY", message)
    if row.pending_version is not None:
        body["pending_config"] = _config(config(row.pending_version), row.pending_version, False, "")
        body["pending_config"]["start_time"] = row.updated_ms
    for shown, version in (("config", row.active_version), ("pending_config", row.pending_version)):
        if version is not None:
            body[f"{shown}_origin"] = "api" if is_operators(connection, row.name, version) else "command_line"
    if row.message:
        body["state"]["message"] = row.message
    if rates := rate_limits_to_wire(connection, row.name):
        body["rate_limits"] = rates
    return body


def by_gateway(row: sa.Row, there: tuple[Gateway, ...], state: dict[str, str]) -> dict[str, Any]:
    """Return what each gateway serves of the endpoint ``row``, and its state with what a gateway that lacks it says."""
    shown = [_of_gateway(row, one.name, one.reports.get(row.id, EndpointReport()), one.serving) for one in there]
    lacking = [one for one in shown if one["state"] not in ("READY", "STARTING")]
    if row.active_version is not None and row.ready != "READY" and "message" not in state and lacking:
        reasons = (f"gateway {one['gateway']}: {one.get('message', _LACKS[one['state']])}" for one in lacking)
        state = state | {"message": "; ".join(reasons)}
    return {"state": state, "gateways": shown}


_LACKS = {"LOADING": "loads the config", "NOT_READY": "an engine does not answer", "FAILED": "cannot serve the config"}


def _of_gateway(row: sa.Row, name: str, report: EndpointReport, serving: bool) -> dict[str, Any]:
    wanted = row.active_version if row.pending_version is None else row.pending_version
    state = "READY" if report.ready else "NOT_READY"
    if report.failed_version is not None and report.failed_version == wanted:
        state = "FAILED"
    elif report.version != wanted:
        state = "LOADING" if serving else "STARTING"
    shown: dict[str, Any] = {"gateway": name, "state": state}
    if report.version is not None:
        shown |= {"config_version": report.version, "content_hash": report.content}
    if report.adapters:
        each = sorted(report.adapters.items())
        shown["adapters"] = [
            {"name": name, "state": one.state}
            | ({"content_hash": one.content_hash} if one.content_hash else {})
            | ({"message": one.message} if one.message else {})
            for name, one in each
        ]
    return shown | ({"message": report.message} if report.message else {})


def by_host(configs: Iterable[EndpointConfig], placed: Placed) -> dict[str, Any]:
    """Return the engines that the served entities of ``configs`` have on joined hosts; nothing if they have none
    there."""
    hosted = {(e.name, placement_key(e)) for config in configs for e in config.served_entities if e.is_hosted}
    if not hosted:
        return {}
    shown = [
        {"served_entity": name, "host": host.name, "state": said.state}
        | ({"address": said.address} if said.state == "READY" else {})
        | ({"message": said.message} if said.message else {})
        for name, engine in sorted(hosted)
        for _, host, said in placed.of(engine)
    ]
    shown += [
        {"served_entity": name, "host": host.name, "state": "FAILED" if start.state == "FAILED" else "LOADING"}
        | ({"message": start.message} if start.message else {})
        for name, engine in sorted(hosted)
        for host in placed.started_for(engine)
        if (start := host.offer.start) is not None and start.state != "JOINED"
    ]
    return {"hosts": shown}


def hosts_to_wire(placed: Placed) -> dict[str, Any]:
    """Return the joined hosts with the engines that are placed on them."""
    return {"hosts": [_host(one, placed) for one in placed.hosts]}


def _host(host: EngineHost, placed: Placed) -> dict[str, Any]:
    engines = []
    for row in (one for one in placed.placements if one.host == host.host):
        model, said = row.entity.model.identity, host.engines.get(row.id, HostedEngine(state="LOADING"))
        shown = {"model": str(model), "content_hash": model.content_hash}
        engines.append(shown | {key: value for key, value in msgspec.to_builtins(said).items() if value})
    start, state = host.offer.start, "DRAINING" if host.draining else "ACTIVE"
    ordered: dict[str, str] = {}
    if start is not None and start.state != "JOINED":
        state, ordered = start.state, {"message": start.message} if start.message else {}
    return {
        "name": host.name,
        "id": host.host,
        "generation": host.generation,
        "started_timestamp": host.started_ms,
        "state": state,
        **ordered,
        "memory": host.offer.memory,
        "cpus": host.offer.cpus,
        "devices": msgspec.to_builtins(list(host.offer.devices)),
        "engines": engines,
    }


def endpoint_in_brief(row: sa.Row, caller: Caller) -> dict[str, Any]:
    """Return the view for callers that do not manage: without models, settings, limits, tags, messages and creator."""
    return {
        "name": row.name,
        "id": row.id,
        "creation_timestamp": row.created_ms,
        "last_updated_timestamp": row.updated_ms,
        "state": {"ready": row.ready, "config_update": row.config_update},
        "task": task_name(tuple(row.tasks.split())),
        "permission_level": caller.permission_level,
    }


def _config(config: EndpointConfig, version: int, ready: bool, message: str) -> dict[str, Any]:
    body = config_to_wire(config) | {"config_version": version}
    deployment = "DEPLOYMENT_READY" if ready else "DEPLOYMENT_CREATING"
    for entity in (*body["served_entities"], *body["served_models"]):
        entity["state"] = {"deployment": deployment, "deployment_state_message": message}
    return body


def task_name(tasks: tuple[str, ...]) -> str:
    """Return one name for possibly several tasks: the first of chat, completions, embeddings that the entities have."""
    return next(_TASK_NAMES[task] for task in _TASK_NAMES if task in tasks)


def tags_to_wire(connection: sa.Connection, name: str) -> list[dict[str, str]]:
    """Return the tags, sorted by key, in the API's form."""
    table = endpoint_tags.c
    query = sa.select(table.key, table.value).where(table.name == name).order_by(table.key)
    return [{"key": key, "value": value} for key, value in connection.execute(query)]


def rate_limits_to_wire(connection: sa.Connection, name: str) -> list[dict[str, Any]]:
    """Return the limits on calls per minute of the endpoint and of its users, in the API's form.

    Soft limits are left out: in this form every limit refuses, and one that was read and put back would.
    """
    of_calls = sa.and_(limits.c.subject == name, limits.c.kind == "qpm", limits.c.scope.in_(("endpoint", "user")))
    query = sa.select(limits.c.scope, limits.c.value).where(of_calls, ~limits.c.soft).order_by(limits.c.scope)
    return [{"calls": value, "key": scope, "renewal_period": "minute"} for scope, value in connection.execute(query)]
