"""``/api/2.0/engine-hosts``: the hosts that have joined the database to run engines (scope ``manage``)."""

from __future__ import annotations

from ...endpoints.reply_types import EngineHostInfos
from ...endpoints.views import hosts_to_wire
from ...frontend.answer import Answer, json_answer
from ...frontend.operation import Auth, Request, with_body
from ...frontend.worker_state import WorkerState
from ..route import Route
from .paths import ENGINE_HOSTS


def list_hosts(server: WorkerState, request: Request) -> Answer:
    """Return every joined host, what it offers, and the engines that are placed on it."""
    return json_answer(hosts_to_wire(server.managed_endpoints().hosts.all()))


ROUTES = (
    Route(
        method="GET",
        path=ENGINE_HOSTS,
        handler=with_body(list_hosts),
        reply=EngineHostInfos,
        summary="List the hosts that have joined to run engines, and what runs on them",
        auth=Auth.MANAGE,
    ),
)
