"""Readiness, for load balancers: whether requests should be sent to this server rather than to another one."""

from __future__ import annotations

from .worker_state import WorkerState

STORE_SECONDS = 5.0
"""A database that is back sooner costs a request at most a retry; a load balancer that moves all of them costs more."""


def reason_against(server: WorkerState) -> str:
    """Return why a load balancer should send its requests elsewhere; "" if it should not.

    A server without any endpoint is ready, since somebody has to take the request that creates the first; one that
    serves none of those that there are is not.
    """
    if server.load_shedder.draining:
        return "the server is shutting down"
    if server.ledger is not None and (seconds := server.ledger.away_seconds) >= STORE_SECONDS:
        return f"the database has not answered for {seconds:.0f} s"
    missing = server.follower.missing if server.follower is not None else ()
    if missing and not tuple(server.endpoints.entities()):
        return f"none of the endpoints is served here: {', '.join(missing)}"
    return ""
