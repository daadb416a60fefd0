"""The leader's decisions on the hosts that Ray starts, drains and ends, and on their number."""

from __future__ import annotations

import pytest

from mlflow_llm.serving.control.ray_runtime.decisions import WantedHosts, decide, waits_for
from mlflow_llm.serving.control.ray_runtime.host_count import HostCount
from mlflow_llm.serving.control.ray_runtime.messages import HostReport, Order, Report, host_name
from mlflow_llm.serving.endpoints.scale import Scale
from mlflow_llm.serving.interface.engine import EngineInfo, Health
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.supervision.supervisor import EngineStatus, ReplicaStatus

ENGINE, OTHER = "e" * 32, "f" * 32
GPU = {"GPU": 1.0}


def host(slot: int, *, answers: bool = True, engine: str = ENGINE, **more: object) -> HostReport:
    return HostReport(name=host_name(engine, slot), answers=answers, **more)  # type: ignore[arg-type]


def two(number: int = 2) -> dict[str, WantedHosts]:
    return {ENGINE: WantedHosts(number=number, resources=GPU)}


def started(order: Order) -> list[str]:
    return [one.name for one in order.start]


def test_missing_hosts_are_started_in_free_slots_but_for_paused_ones() -> None:
    """An engine's missing hosts get its lowest free slots, with its resources; a name whose start failed waits."""
    order = decide(two(), [])
    assert started(order) == [host_name(ENGINE, 0), host_name(ENGINE, 1)]
    assert order.start[0].resources == GPU
    assert started(decide(two(), [host(1)])) == [host_name(ENGINE, 0)]
    assert started(decide(two(), [host(1, answers=False)])) == [host_name(ENGINE, 0)]
    assert started(decide(two(), [host(1)], paused=[host_name(ENGINE, 0)])) == []
    assert decide(two(), [host(0), host(1)]) == Order()


def test_hosts_too_many_drain_the_unready_first_and_are_killed_if_they_never_answered() -> None:
    """The hosts that are too many end, first those whose engine is not ready, then the youngest; what never started is
    killed.
    """
    names = [host_name(ENGINE, slot) for slot in range(3)]
    assert decide(two(1), [host(0), host(1)], ready=names) == Order(drain=(names[1],))
    assert decide(two(1), [host(0), host(1)], ready=names[1:]) == Order(drain=(names[0],))
    assert decide(two(1), [host(0), host(1, answers=False)]) == Order(kill=(names[1],))
    assert decide(two(1), [host(0), host(1, draining=True)]) == Order()


def test_a_host_on_a_leaving_node_drains_when_its_successor_is_ready_or_time_is_short() -> None:
    """A node that goes gets its successor at once, and its host goes on until that is ready or the time is just enough
    to drain.
    """
    leaving, successor = host(0, leaves_at=1000.0), host(1)
    assert started(decide(two(1), [leaving], now=0)) == [host_name(ENGINE, 1)]
    assert decide(two(1), [leaving, successor], now=0) == Order()
    assert decide(two(1), [leaving, successor], now=0, ready=[successor.name]).drain == (leaving.name,)
    assert decide(two(1), [leaving, successor], now=965.0).drain == (leaving.name,)
    without_time = host(0, leaves_at=0.0)
    assert decide(two(1), [without_time, successor], now=965.0) == Order()


def test_hosts_of_engines_that_nobody_wants_end_but_for_kept_ones() -> None:
    """A host whose deployment is gone drains, unless a gateway may still have requests on its engine."""
    old = host(0, engine=OTHER)
    assert decide({}, [old]) == Order(drain=(old.name,))
    assert decide({}, [old], kept=[OTHER]) == Order()
    assert decide(two(1), [old, host(0)]) == Order(drain=(old.name,))


def test_what_a_host_waits_for_names_its_resources() -> None:
    """The reason says whether any node could take the host at all."""
    nodes = ({"CPU": 8.0}, {"CPU": 8.0, "GPU": 2.0})
    assert waits_for(Report(nodes=nodes), {"GPU": 4.0}) == "Ray has no node with GPU: 4; it waits for one"
    assert waits_for(Report(nodes=nodes), GPU) == "Ray starts it, or waits for GPU: 1 to be free on a node"


def status(*loads: tuple[int, int]) -> EngineStatus:
    """Return the status of an engine whose ready replicas run and hold waiting so many sequences, 4 at once."""
    info = EngineInfo(content_hash="0", tasks=("chat",), vocab_size=1, max_model_len=1, max_num_seqs=4, max_kv_tokens=1)
    replicas = tuple(
        ReplicaStatus(
            index=place,
            address=str(place),
            state="ready",
            health=Health(status="ready", num_running=running, num_waiting=waiting),
        )
        for place, (running, waiting) in enumerate(loads)
    )
    return EngineStatus(entity="e", wanted=len(replicas), replicas=replicas, info=info)


def test_the_number_of_hosts_follows_the_load_between_min_and_max() -> None:
    """A queue asks for one more host, and for no more until that one is ready; low load takes one away after a minute;
    a leader begins with what there is.
    """
    scale = Scale(min=1, max=3)
    count = HostCount(0)
    assert count.look(scale, None, 0.0) == 1
    assert count.look(scale, status((4, 2)), 1.0) == 2
    assert count.look(scale, status((4, 2)), 2.0) == 2
    assert count.look(scale, status((4, 2), (4, 2)), 3.0) == 3
    assert count.look(scale, status((4, 9), (4, 9), (4, 9)), 4.0) == 3
    idle = status((0, 0), (0, 0), (0, 0))
    assert [count.look(scale, idle, at) for at in (5.0, 64.0, 65.0, 124.0, 125.0, 999.0)] == [3, 3, 2, 2, 1, 1]
    assert HostCount(2).look(scale, None, 0.0) == 2
    assert HostCount(9).look(scale, None, 0.0) == 3
    assert HostCount(9).look(Scale(min=2), idle, 0.0) == 2


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"min": 2, "max": 1}, "scale.max"),
        ({"min": 0}, "scale.min"),
        ({"runtime": "slurm"}, "scale.runtime"),
        ({"resources": {"GPU": 1.5}}, "scale.resources.GPU"),
        ({"resources": {"GPU": 0}}, "scale.resources.GPU"),
        ({"resources": {"CPU": -1}}, "scale.resources.CPU"),
        ({"resources": {"object_store_memory": 1}}, "scale.resources"),
        ({"resources": {"": 1}}, "scale.resources"),
        ({"nodes": 3}, "scale.nodes"),
    ],
)
def test_a_scale_that_cannot_be_is_refused_by_its_field(given: dict[str, object], field: str) -> None:
    """A value that no cluster could have is refused by the name of its field."""
    from mlflow_llm.serving.endpoints.config_body import config_body

    entity = {"entity_name": "assistant", "entity_version": "1", "scale": given}
    with pytest.raises(InvalidField) as refused:
        config_body({"served_entities": [entity]}, "")
    assert refused.value.param == f"served_entities[0].{field}"
