"""Databricks' management API of endpoints (``/api/2.0/serving-endpoints``), on the store that the keeper follows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..dialects.json_body import read_object
from ..endpoints.store import EndpointStore
from ..errors import Conflict, InvalidField, NotFound
from ..metering.audit import Actor
from ..metering.authorization import Caller
from ..observability import metrics
from . import openapi
from .answer import Answer, json_answer
from .invoke import Server

GONE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request to the server itself: who, the name and other parts of the path, the body's bytes, the values of each
    parameter."""

    caller: Caller
    request_id: str = ""
    name: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    query: Mapping[str, list[str]] = field(default_factory=dict)

    def object(self) -> dict[str, Any]:
        """The body, a JSON object. Raises ``RequestError``."""
        return read_object(self.body, dict)

    def single(self) -> dict[str, str]:
        """The parameters, each given once. Raises ``InvalidField``."""
        for name, values in self.query.items():
            if len(values) > 1:
                raise InvalidField(name[:80], values, "one value")
        return {name: values[0] for name, values in self.query.items()}

    @property
    def by(self) -> Actor:
        """For the audit log."""
        caller = self.caller
        return Actor(name=caller.key_id, via="http", tenant=caller.tenant, request_id=self.request_id)


def _endpoints(server: Server) -> EndpointStore:
    if server.management is None:
        raise NotFound("this server has no store of endpoints")
    found: EndpointStore = server.management
    return found


def create(server: Server, asked: Asked) -> Answer:
    endpoints, body = _endpoints(server), asked.object()
    if body.get("rate_limits"):
        _check_ledger(server, "rate_limits")
    return json_answer(endpoints.create(body, by=asked.by))


def list_all(server: Server, asked: Asked) -> Answer:
    return json_answer(_endpoints(server).list(asked.caller))


def get(server: Server, asked: Asked) -> Answer:
    return json_answer(_endpoints(server).get(asked.name, asked.caller))


def delete(server: Server, asked: Asked) -> Answer:
    """Answers when this worker has stopped taking requests for it; what runs is finished."""
    _endpoints(server).delete(asked.name, by=asked.by)
    until = time.monotonic() + GONE_SECONDS
    while any(endpoint.name == asked.name for endpoint in server.endpoints) and time.monotonic() < until:
        time.sleep(0.02)
    return json_answer({})


def update_config(server: Server, asked: Asked) -> Answer:
    return json_answer(_endpoints(server).update_config(asked.name, asked.object(), by=asked.by))


def put_rate_limits(server: Server, asked: Asked) -> Answer:
    endpoints, body = _endpoints(server), asked.object()
    if body.get("rate_limits"):
        _check_ledger(server, "rate_limits")
    return json_answer(endpoints.put_rate_limits(asked.name, body, by=asked.by))


def patch_tags(server: Server, asked: Asked) -> Answer:
    return json_answer(_endpoints(server).patch_tags(asked.name, asked.object(), by=asked.by))


def get_openapi(server: Server, asked: Asked) -> Answer:
    """The part of ``/openapi.json`` that is about this endpoint."""
    _endpoints(server).get(asked.name, asked.caller)
    document = openapi.document()
    path = "/serving-endpoints/{name}/invocations"
    operation = dict(document["paths"][path]["post"])
    operation["parameters"] = [p for p in operation["parameters"] if p["in"] != "path"]
    return json_answer(document | {"paths": {path.format(name=asked.name): {"post": operation}}})


def get_metrics(server: Server, asked: Asked) -> Answer:
    """The part of ``/metrics`` that is about this endpoint: every tenant's requests, so it is for who manages."""
    asked.caller.check_scope("manage")
    _endpoints(server).get(asked.name)
    label = f'endpoint="{asked.name}"'.encode()
    lines = metrics.exposition(server.endpoints).splitlines(keepends=True)
    kept = b"".join(line for line in lines if line.startswith(b"#") or label in line)
    return Answer(body=kept, content_type=metrics.CONTENT_TYPE)


def _check_ledger(server: Server, field: str) -> None:
    if server.ledger is None:
        raise Conflict(f"{field}: this server keeps no ledger to limit by; start it with --database")


ANSWERS: Mapping[str, Callable[[Server, Asked], Answer]] = {
    "create_serving_endpoint": create,
    "list_serving_endpoints": list_all,
    "get_serving_endpoint": get,
    "delete_serving_endpoint": delete,
    "update_serving_endpoint": update_config,
    "put_serving_rate_limits": put_rate_limits,
    "patch_serving_tags": patch_tags,
    "get_serving_openapi": get_openapi,
    "get_serving_metrics": get_metrics,
}
