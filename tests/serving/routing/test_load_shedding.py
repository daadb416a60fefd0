"""Load shedding: what waits of one key leaves room in an endpoint's queue for others, and best effort for
provisioned."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mlflow_llm.serving.interface.engine import Health
from mlflow_llm.serving.interface.errors import Overloaded
from mlflow_llm.serving.metering.accounts.keys import Caller
from mlflow_llm.serving.routing.load_shedding import LoadShedder

QUEUE = 256


class Engine:
    """An engine that runs four requests at once and reports ``waiting`` and ``provisioned`` in its heartbeat."""

    num_replicas = 1

    def __init__(self, waiting: int = 0, provisioned: int = 0) -> None:
        self.info, self.waiting, self.provisioned = SimpleNamespace(max_num_seqs=4), waiting, provisioned

    def health(self) -> Health:
        return Health(status="ready", num_waiting=self.waiting, num_provisioned=self.provisioned)


def key(name: str, tenant: str | None = None) -> Caller:
    return Caller(key_id=name, tenant=tenant or name)


def flood(shedder: LoadShedder, engine: Engine, caller: Caller | None, requests: int = 1000) -> int:
    """Return how many of a flood of requests are admitted."""
    for done in range(requests):
        try:
            shedder.enter("chat", engine, caller=caller)
        except Overloaded:
            return done
    return requests


def test_a_flood_of_one_key_leaves_room() -> None:
    """A flood of requests of one key fills a third of the queue, and each further tenant gets a share of the rest."""
    shedder, engine = LoadShedder(max_queued=QUEUE, retry_after=1.0), Engine()
    assert flood(shedder, engine, key("greedy")) - 4 == 86
    others = [flood(shedder, engine, key(name)) for name in ("b", "c", "d")]
    assert others == [57, 38, 25]
    assert flood(shedder, engine, key("e")) >= QUEUE // 16


def test_keys_of_a_tenant_share() -> None:
    """A hundred keys of a tenant share half of the queue, and each gets no more than any other's third."""
    shedder, engine = LoadShedder(max_queued=QUEUE, retry_after=1.0), Engine()
    of_tenant = [flood(shedder, engine, key(f"k{i}", "many")) for i in range(100)]
    assert sum(of_tenant) - 4 == QUEUE // 2
    assert of_tenant[1] >= 40
    assert flood(shedder, engine, key("other")) == 43


def test_a_share_is_given_back() -> None:
    """Requests that leave free their caller's share completely."""
    shedder, engine = LoadShedder(max_queued=QUEUE, retry_after=1.0), Engine()
    let_in = flood(shedder, engine, key("greedy"))
    for _ in range(let_in):
        shedder.leave(engine, caller=key("greedy"))
    assert shedder.running(engine) == 0
    assert flood(shedder, engine, key("greedy")) == let_in


def test_a_full_engine_still_takes_a_newcomer() -> None:
    """If other workers have filled the engine's queue, a caller with nothing queued here gets a sixteenth of it."""
    shedder, engine = LoadShedder(max_queued=QUEUE, retry_after=1.0, workers=4), Engine(waiting=10_000)
    assert flood(shedder, engine, key("newcomer")) - 1 == QUEUE // 16


def test_shares_of_several_workers_leave_room() -> None:
    """Four workers with the same greedy key leave room, since each sees the others' requests in the heartbeat."""
    engine = Engine()
    workers = [LoadShedder(max_queued=QUEUE, retry_after=1.0, workers=4) for _ in range(4)]
    for _ in range(200):
        for shedder in workers:
            flood(shedder, engine, key("greedy"), 1)
            engine.waiting = sum(shedder.running(engine) for shedder in workers) - 4
    assert engine.waiting < QUEUE * 3 / 4
    assert flood(workers[0], engine, key("other")) > QUEUE // 16


def test_without_keys_there_are_no_shares() -> None:
    """Without keys all callers share the whole queue."""
    shedder, engine = LoadShedder(max_queued=QUEUE, retry_after=1.0), Engine()
    assert flood(shedder, engine, None) == 4 + QUEUE


def test_with_max_queued_0_nothing_waits() -> None:
    """With max_queued 0 a key may have every place of the batch, and nothing waits."""
    shedder, engine = LoadShedder(max_queued=0, retry_after=1.0), Engine()
    assert flood(shedder, engine, key("greedy")) == 4
    with pytest.raises(Overloaded, match="requests waiting already"):
        shedder.enter("chat", engine, caller=key("other"))


def test_a_queue_of_others_keeps_no_provisioned_request_out() -> None:
    """A provisioned request waits only for those before it: other requests in the queue do not keep it out."""
    shedder, flooded = LoadShedder(max_queued=2, retry_after=1.0), Engine(waiting=50)
    with pytest.raises(Overloaded):
        shedder.enter("paid", flooded)
    for _ in range(6):
        shedder.enter("provisioned", flooded, reserves=True)
    assert shedder.running(flooded) == 6
    with pytest.raises(Overloaded):
        shedder.enter("provisioned", flooded, reserves=True)
    for _ in range(6):
        shedder.leave(flooded, reserves=True)
    assert shedder.running(flooded) == 0
    with pytest.raises(Overloaded):
        shedder.enter("provisioned", Engine(provisioned=6), reserves=True)
