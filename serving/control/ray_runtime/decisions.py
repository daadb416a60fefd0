"""The decisions about hosts that Ray starts, drains and ends: pure functions of what is wanted and what there is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from .messages import HostOrder, HostReport, Order, Report, host_name, is_for, slot_of

MARGIN_SECONDS = 10.0  # before a node goes, beside the time for draining


class WantedHosts(Struct, frozen=True, kw_only=True):
    """The hosts that an engine should have, with the resources that each takes of a node."""

    number: int
    resources: dict[str, float]


def decide(
    wanted: Mapping[str, WantedHosts],
    hosts: Iterable[HostReport],
    *,
    kept: Collection[str] = (),
    ready: Collection[str] = (),
    paused: Collection[str] = (),
    now: float = 0.0,
    drain_seconds: float = 30.0,
) -> Order:
    """Return the order that brings the hosts of each engine to what is wanted.

    Hosts on a node that goes get successors at once, and drain when those are ``ready`` (their engine answers), or when
    there is just time left to drain. Hosts of engines that nobody wants drain, but for ``kept`` ones, on which gateways
    may still have requests. No host is started under a ``paused`` name, whose last start has failed.
    """
    found = tuple(hosts)
    start: list[HostOrder] = []
    ended: list[HostReport] = []
    for engine, one in wanted.items():
        own = [host for host in found if is_for(host.name, engine)]
        staying = [host for host in own if not host.draining and host.leaves_at is None]
        taken = {slot_of(host.name) for host in own}
        free = (slot for slot in range(len(taken) + one.number) if slot not in taken)
        names = [host_name(engine, slot) for slot, _ in zip(free, range(one.number - len(staying)), strict=False)]
        start += [HostOrder(name=name, engine=engine, resources=one.resources) for name in names if name not in paused]
        staying.sort(key=lambda host: (host.name not in ready, not host.answers, slot_of(host.name)))
        ended += staying[one.number :]
        replaced = sum(host.name in ready for host in staying) >= one.number
        for host in own:
            if host.leaves_at is not None and not host.draining:
                is_late = 0 < host.leaves_at <= now + drain_seconds + MARGIN_SECONDS
                if replaced or is_late or not host.answers:
                    ended.append(host)
    known = (*wanted, *kept)
    ended += [host for host in found if not any(is_for(host.name, engine) for engine in known) and not host.draining]
    return Order(
        start=tuple(start),
        drain=tuple(host.name for host in ended if host.answers),
        kill=tuple(host.name for host in ended if not host.answers),
    )


def waits_for(report: Report, resources: Mapping[str, float]) -> str:
    """Return what a host waits for that has been ordered with these resources."""
    asked = ", ".join(f"{name}: {amount:g}" for name, amount in sorted(resources.items()))
    if not any(all(node.get(name, 0.0) >= amount for name, amount in resources.items()) for node in report.nodes):
        return f"Ray has no node with {asked}; it waits for one"
    return f"Ray starts it, or waits for {asked} to be free on a node"
