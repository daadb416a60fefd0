"""Gateways of one database: one of them leads, and an endpoint is ready when all of them serve it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlflow_llm.serving.control.fleet import BEAT_SECONDS, SILENT_SECONDS, Fleet, verdict
from mlflow_llm.serving.endpoints.gateways import EndpointReport, Fence, Gateway, NotLeader
from mlflow_llm.serving.endpoints.store import EndpointState, EndpointStore
from mlflow_llm.serving.system.file_locks import try_acquire

CONFIG = {"served_entities": [{"entity_name": "assistant", "entity_version": "1"}]}


class Clock:
    """A monotonic clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def join(endpoints: EndpointStore, clock: Clock) -> Callable[..., Fleet]:
    def call(name: str, **options: object) -> Fleet:
        return Fleet(endpoints, name=name, **({"monotonic": clock} | options))  # type: ignore[arg-type]

    return call


def tick(fleet: Fleet, endpoints: EndpointStore, **report: object) -> None:
    """Report the same of every endpoint."""
    states = endpoints.states()
    fleet.tick(states, {one.id: EndpointReport(**report) for one in states}, serving=True)  # type: ignore[arg-type]


def beat_until(done: Callable[[], bool], clock: Clock, endpoints: EndpointStore, *fleets: Fleet) -> float:
    """Let ``fleets`` beat until ``done``, and return the seconds that this took by their clock."""
    began = clock.now
    while not done():
        assert clock.now - began < 60
        clock.now += BEAT_SECONDS
        for fleet in fleets:
            tick(fleet, endpoints)
    return clock.now - began


def test_one_of_two_leads_and_the_other_takes_over_within_ten_seconds(
    endpoints: EndpointStore, join: Callable[..., Fleet], clock: Clock
) -> None:
    """One of two gateways leads; when it is silent, the other takes over, and its writes are refused from then on."""
    first, second = join("a"), join("b")
    for _ in range(20):
        for fleet in (first, second):
            tick(fleet, endpoints)
        clock.now += BEAT_SECONDS
        assert (first.fence is not None, second.fence is not None) == (True, False)
    endpoints.create({"name": "chat", "config": CONFIG})
    stale = first.fence
    assert beat_until(lambda: second.fence is not None, clock, endpoints, second) <= 10
    assert stale is not None
    assert second.fence is not None
    assert second.fence.number == stale.number + 1
    before = endpoints.get("chat")["state"]
    for write in (
        lambda: endpoints.mark_ready("chat", 1, fence=stale),
        lambda: endpoints.mark_failed("chat", 1, "late", fence=stale),
        lambda: endpoints.set_ready("chat", False, fence=stale),
        lambda: endpoints.gateways.remove(list(endpoints.gateways.all()), stale),
    ):
        with pytest.raises(NotLeader):
            write()
    assert endpoints.get("chat")["state"] == before
    assert [one.name for one in endpoints.gateways.all()] == ["b"]


def test_a_suspended_leader_changes_nothing_when_it_is_back(
    endpoints: EndpointStore, join: Callable[..., Fleet], clock: Clock
) -> None:
    """A leader that was suspended and believes that it has just renewed its lease records nothing when it goes on."""
    endpoints.create({"name": "chat", "config": CONFIG})
    first, second, third = join("a", monotonic=Clock()), join("b"), join("c")  # the first one's clock stands still
    for fleet in (first, second, third):
        tick(fleet, endpoints)
    beat_until(lambda: second.fence is not None, clock, endpoints, second, third)
    tick(third, endpoints, failed_version=1, message="no memory")
    assert first.fence is not None
    tick(first, endpoints)
    assert first.fence is None
    assert endpoints.get("chat")["state"]["config_update"] == "IN_PROGRESS"
    tick(second, endpoints)
    assert endpoints.get("chat")["state"]["message"] == "gateway c: no memory"


def test_a_gateway_that_ends_gives_the_lease_back(
    endpoints: EndpointStore, join: Callable[..., Fleet], clock: Clock
) -> None:
    """When the leader ends, the next beat of another gateway takes over, and nobody waits for the one that ended."""
    first, second = join("a"), join("b")
    tick(first, endpoints)
    tick(second, endpoints)
    first.leave()
    clock.now += BEAT_SECONDS
    tick(second, endpoints)
    assert second.fence is not None
    assert [one.name for one in endpoints.gateways.all()] == ["b"]


def test_a_killed_gateway_of_the_same_host_is_known_at_once(
    endpoints: EndpointStore, join: Callable[..., Fleet], tmp_path: Path, clock: Clock
) -> None:
    """A gateway whose lock the kernel has released is not waited for."""
    first, second = join("a", place=tmp_path / "gateways"), join("b", place=tmp_path / "gateways")
    tick(first, endpoints)
    assert first.lock is not None
    first.lock.release()  # as the kernel does
    tick(second, endpoints)
    assert second.fence is not None
    assert [one.name for one in endpoints.gateways.all()] == ["b"]
    assert [path.name for path in (tmp_path / "gateways").iterdir()] == [second.gateway]


def test_a_restarted_controller_process_leads_on(
    endpoints: EndpointStore, join: Callable[..., Fleet], tmp_path: Path
) -> None:
    """A controller process that follows a killed one of the same server has its lease, with a new fence."""
    first = join("a", gateway="g1", place=tmp_path)
    tick(first, endpoints)
    assert first.lock is not None
    first.lock.release()
    second = join("a", gateway="g1", place=tmp_path)
    tick(second, endpoints)
    assert (first.fence, second.fence) == (Fence(holder="g1", number=1), Fence(holder="g1", number=2))
    assert try_acquire(str(tmp_path / "g1")) is None


def test_an_update_waits_for_every_gateway(endpoints: EndpointStore, join: Callable[..., Fleet], clock: Clock) -> None:
    """An endpoint is ready when all gateways serve its config, and not while an engine of one does not answer."""
    first, second = join("a"), join("b")
    tick(first, endpoints)
    tick(second, endpoints)
    endpoints.create({"name": "chat", "config": CONFIG})
    tick(first, endpoints, version=1, content="c", ready=True)
    tick(second, endpoints)
    tick(first, endpoints, version=1, content="c", ready=True)
    shown = endpoints.get("chat")
    assert shown["state"] == {"ready": "NOT_READY", "config_update": "IN_PROGRESS"}
    assert shown["gateways"] == [
        {"gateway": "a", "state": "READY", "config_version": 1, "content_hash": "c"},
        {"gateway": "b", "state": "LOADING"},
    ]
    tick(second, endpoints, version=1, content="c", ready=True)
    tick(first, endpoints, version=1, content="c", ready=True)
    assert endpoints.get("chat")["state"] == {"ready": "READY", "config_update": "NOT_UPDATING"}
    tick(second, endpoints, version=1, content="c", ready=False)
    clock.now += BEAT_SECONDS
    tick(first, endpoints, version=1, content="c", ready=True)
    message = "gateway b: an engine does not answer"
    assert endpoints.get("chat")["state"] == {
        "ready": "NOT_READY",
        "config_update": "NOT_UPDATING",
        "message": message,
    }
    clock.now += SILENT_SECONDS
    tick(first, endpoints, version=1, content="c", ready=True)  # which sees that the other one is silent
    assert endpoints.get("chat")["state"] == {"ready": "READY", "config_update": "NOT_UPDATING"}


def test_a_failure_names_its_gateway(endpoints: EndpointStore, join: Callable[..., Fleet]) -> None:
    """An update that one of two gateways cannot serve fails, and the reason names the gateway."""
    first, second = join("a"), join("b")
    tick(first, endpoints)
    tick(second, endpoints)
    endpoints.create({"name": "chat", "config": CONFIG})
    tick(second, endpoints, failed_version=1, message="there is no directory /models/1")
    assert endpoints.get("chat")["gateways"][1]["state"] == "FAILED"
    tick(first, endpoints, version=1, ready=True)
    state = endpoints.get("chat")["state"]
    assert state["config_update"] == "UPDATE_FAILED"
    assert state["message"] == "gateway b: there is no directory /models/1"


def test_the_leader_decides_by_gateways_that_take_requests() -> None:
    """A gateway that starts delays no update of the others and makes no endpoint unready, but its failure counts."""
    new = EndpointState(name="e", id="e", created_ms=0, ready=False, active_version=None, pending_version=1)
    active = EndpointState(name="e", id="e", created_ms=0, ready=True, active_version=1, pending_version=None)

    def gateway(name: str, *, serving: bool = True, **report: object) -> Gateway:
        reports = {"e": EndpointReport(**report)}  # type: ignore[arg-type]
        return Gateway(gateway=name, name=name, started_ms=0, serving=serving, beat=0, reports=reports)

    has, starts = gateway("a", version=1, ready=True), gateway("b", serving=False)
    for gateways, expected in (
        ((has, starts), (1, None)),
        ((starts,), (None, None)),
        ((gateway("b", serving=False, version=1),), (1, None)),
        ((has, gateway("b")), (None, None)),
        ((has, gateway("b", serving=False, failed_version=1, message="m")), (None, (1, "gateway b: m"))),
        ((gateway("b", failed_version=1, message="m"),), (None, (1, "m"))),
    ):
        found = verdict(new, gateways)
        assert ((found.served, found.failed) if found else (None, None)) == expected
    assert verdict(active, (has, starts)) is None
    for gateways in ((), (has, gateway("b")), (gateway("a", version=1, ready=False),)):
        found = verdict(active, gateways)
        assert found is not None
        assert found.ready is False
