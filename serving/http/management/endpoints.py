"""Databricks' management API of endpoints (``/api/2.0/serving-endpoints``), on the reconciler's store."""

from __future__ import annotations

import time

from ...dialects import DIALECTS
from ...endpoints.config_body import config_body, guardrails
from ...endpoints.management_body import NEW_ENDPOINT, NEW_RATE_LIMITS, ROLLBACK, TAG_CHANGES
from ...endpoints.reply_types import ConfigVersions, EndpointInfo, EndpointInfos, RateLimitInfos, TagInfos
from ...frontend.answer import Answer, json_answer
from ...frontend.operation import Auth, Request, with_body
from ...frontend.worker_state import WorkerState
from ...interface.errors import Conflict
from ...interface.guardrails import check_scorers
from ...observability import metrics
from ..route import NoFields, Route
from .paths import SERVING_ENDPOINTS

GONE_SECONDS = 2.0


def create(server: WorkerState, request: Request) -> Answer:
    endpoints, body = server.managed_endpoints(), request.json()
    if body.get("rate_limits"):
        _check_ledger(server, "rate_limits")
    _check_log(server, body.get("config"), "config.payload_log")
    _check_scorers(server, body.get("config"), "config.guardrails")
    return json_answer(endpoints.create(body, by=request.actor))


def list_all(server: WorkerState, request: Request) -> Answer:
    return json_answer(server.managed_endpoints().list(request.caller))


def get(server: WorkerState, request: Request) -> Answer:
    return json_answer(server.managed_endpoints().get(request.name, request.caller))


def delete(server: WorkerState, request: Request) -> Answer:
    """Delete an endpoint. Respond when this worker takes no more requests for it; running requests are finished."""
    server.managed_endpoints().delete(request.name, by=request.actor)
    until = time.monotonic() + GONE_SECONDS
    while any(served.endpoint == request.name for served in server.endpoints) and time.monotonic() < until:
        time.sleep(0.02)
    return json_answer({})


def update_config(server: WorkerState, request: Request) -> Answer:
    endpoints, body = server.managed_endpoints(), request.json()
    _check_log(server, body, "payload_log")
    _check_scorers(server, body, "guardrails")
    return json_answer(endpoints.update_config(request.name, body, by=request.actor))


def give_back_config(server: WorkerState, request: Request) -> Answer:
    return json_answer(server.managed_endpoints().give_back(request.name, by=request.actor))


def list_versions(server: WorkerState, request: Request) -> Answer:
    """Return the history of an endpoint's config. It needs the scope ``manage``: it shows models and settings."""
    request.caller.check_scope("manage")
    return json_answer(server.managed_endpoints().history(request.name))


def roll_back(server: WorkerState, request: Request) -> Answer:
    return json_answer(server.managed_endpoints().roll_back(request.name, request.json(), by=request.actor))


def put_rate_limits(server: WorkerState, request: Request) -> Answer:
    endpoints, body = server.managed_endpoints(), request.json()
    if body.get("rate_limits"):
        _check_ledger(server, "rate_limits")
    return json_answer(endpoints.put_rate_limits(request.name, body, by=request.actor))


def patch_tags(server: WorkerState, request: Request) -> Answer:
    return json_answer(server.managed_endpoints().patch_tags(request.name, request.json(), by=request.actor))


def get_metrics(server: WorkerState, request: Request) -> Answer:
    """Return the part of ``/metrics`` about this endpoint. It needs the scope ``manage``, because it shows the requests
    of all tenants."""
    request.caller.check_scope("manage")
    server.managed_endpoints().get(request.name)
    label = f'endpoint="{request.name}"'.encode()
    lines = metrics.exposition(server.endpoints).splitlines(keepends=True)
    kept = b"".join(line for line in lines if line.startswith(b"#") or label in line)
    return Answer(body=kept, content_type=metrics.CONTENT_TYPE)


def _check_ledger(server: WorkerState, field: str) -> None:
    if server.ledger is None:
        raise Conflict(f"{field}: this server keeps no ledger to limit by; start it with --database")


def _check_log(server: WorkerState, config: object, field: str) -> None:
    if server.ledger is None and isinstance(config, dict) and config.get("payload_log") is not None:
        raise Conflict(f"{field}: this server has no database to keep texts in; start it with --database")


def _check_scorers(server: WorkerState, config: object, field: str) -> None:
    if isinstance(config, dict) and config.get("guardrails") is not None:
        check_scorers(guardrails(config["guardrails"], field), server.scorers.names, field)


ONE = f"{SERVING_ENDPOINTS}/<name>"
_DATABRICKS = DIALECTS["databricks"]
_CONFIG = {"served_entities": [{"entity_name": "assistant", "entity_version": "1"}]}

ROUTES = (
    Route(
        method="POST",
        path=SERVING_ENDPOINTS,
        handler=with_body(create),
        reply=EndpointInfo,
        example={"name": "second", "config": _CONFIG},
        summary="Create an endpoint; it is ready when its engines are",
        dialect=_DATABRICKS,
        auth=Auth.MANAGE,
        body=NEW_ENDPOINT,
    ),
    Route(
        method="GET",
        path=SERVING_ENDPOINTS,
        handler=with_body(list_all),
        reply=EndpointInfos,
        summary="List endpoints",
        dialect=_DATABRICKS,
    ),
    Route(
        method="GET",
        path=ONE,
        handler=with_body(get),
        reply=EndpointInfo,
        summary="One endpoint: its state, config and pending config",
        dialect=_DATABRICKS,
    ),
    Route(
        method="DELETE",
        path=ONE,
        handler=with_body(delete),
        reply=NoFields,
        summary="Delete an endpoint after draining",
        dialect=_DATABRICKS,
        auth=Auth.MANAGE,
    ),
    Route(
        method="PUT",
        path=f"{ONE}/config",
        handler=with_body(update_config),
        reply=EndpointInfo,
        example=_CONFIG,
        summary="Update an endpoint's config without dropping a request",
        dialect=_DATABRICKS,
        auth=Auth.MANAGE,
        body=config_body,
    ),
    Route(
        method="DELETE",
        path=f"{ONE}/config",
        handler=with_body(give_back_config),
        reply=EndpointInfo,
        summary="Go back to the config that the command line declares",
        dialect=_DATABRICKS,
        auth=Auth.MANAGE,
    ),
    Route(
        method="GET",
        path=f"{ONE}/config-versions",
        handler=with_body(list_versions),
        reply=ConfigVersions,
        summary="Every version of an endpoint's config: who made it, when, and what became of it",
        dialect=_DATABRICKS,
    ),
    Route(
        method="POST",
        path=f"{ONE}/rollback",
        handler=with_body(roll_back),
        reply=EndpointInfo,
        example={"config_version": 1},
        summary="Serve an earlier version of the config again, as a new version",
        dialect=_DATABRICKS,
        auth=Auth.MANAGE,
        body=ROLLBACK,
    ),
    Route(
        method="PUT",
        path=f"{ONE}/rate-limits",
        handler=with_body(put_rate_limits),
        reply=RateLimitInfos,
        example={"rate_limits": [{"calls": 60, "key": "user", "renewal_period": "minute"}]},
        summary="Replace the rate limits",
        dialect=_DATABRICKS,
        auth=Auth.MANAGE,
        body=NEW_RATE_LIMITS,
    ),
    Route(
        method="PATCH",
        path=f"{ONE}/tags",
        handler=with_body(patch_tags),
        reply=TagInfos,
        example={"add_tags": [{"key": "team", "value": "search"}]},
        summary="Add and delete tags",
        dialect=_DATABRICKS,
        auth=Auth.MANAGE,
        body=TAG_CHANGES,
    ),
    Route(
        method="GET",
        path=f"{ONE}/metrics",
        handler=with_body(get_metrics),
        summary="The metrics of one endpoint",
        dialect=_DATABRICKS,
        produces=("text/plain",),
    ),
)
