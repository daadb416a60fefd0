"""The messages between the leader and its Ray process: an order, and a report that answers it, each a line of JSON."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

PREFIX = "ray-"
ENGINE_DIGITS = 16  # of an engine's key, in the names of its hosts


class Launch(Struct, frozen=True, kw_only=True):
    """The facts that the hosts of a service are started with, and where its Ray cluster is.

    ``namespace`` keeps services apart that share a cluster. ``key`` is what engines share with gateways. Ray keeps both
    it and the URL of the ``database``, with its password, for as long as the actor lives; whoever can use the cluster
    can run code on its nodes, and read them there.
    """

    address: str | None
    namespace: str
    database: str
    key: str
    drain_timeout: float = 30.0
    grants: dict[str, Any] = {}
    environment: dict[str, str] = {}


class HostOrder(Struct, frozen=True, kw_only=True):
    """The order to start a host for ``engine`` with these resources of a node."""

    name: str
    engine: str
    resources: dict[str, float]


class Order(Struct, frozen=True, kw_only=True):
    """The order to start, drain and end hosts, by their names. All of it may be repeated: what is done stays done."""

    start: tuple[HostOrder, ...] = ()
    drain: tuple[str, ...] = ()
    kill: tuple[str, ...] = ()


class HostReport(Struct, frozen=True, kw_only=True):
    """A host as its actor reports it; one that does not ``answer`` has not started yet, or its node is gone.

    ``leaves_at`` is when its node, which drains or is preempted, will be gone: seconds of the wall clock, 0 for a node
    that says no time, None for one that stays. ``message`` says why the host does not run.
    """

    name: str
    answers: bool = False
    draining: bool = False
    leaves_at: float | None = None
    message: str = ""


class Report(Struct, frozen=True, kw_only=True):
    """The hosts that the cluster has. ``failed`` are those that could not be started, with the reason; ``nodes`` the
    resources of each node that takes new hosts; ``error`` says why nothing else is known."""

    error: str = ""
    hosts: tuple[HostReport, ...] = ()
    failed: dict[str, str] = {}
    nodes: tuple[dict[str, float], ...] = ()


def host_name(engine: str, slot: int) -> str:
    """Return the name of a host, and of its actor: that of one slot of an engine. Two leaders that both believe to lead
    start the same actor, since Ray has each name once."""
    return f"{PREFIX}{engine[:ENGINE_DIGITS]}-{slot}"


def is_for(name: str, engine: str) -> bool:
    """Return whether a host of this name runs ``engine``."""
    return name.startswith(f"{PREFIX}{engine[:ENGINE_DIGITS]}-")


def slot_of(name: str) -> int:
    """Return the slot of a host of this name."""
    return int(name.rpartition("-")[2])
