"""Accept balancing: whose turn it is to take a connection, by the table that all workers see."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from mlflow_llm.serving.http.gunicorn.accept_balancing import HUNG_SECONDS, AcceptBalancer, WorkerSlot


def workers(number: int) -> tuple[AcceptBalancer, list[WorkerSlot]]:
    balancer = AcceptBalancer(number)
    given = [balancer.assign() for _ in range(number)]
    for slot in given:
        slot.open()
    return balancer, given


def deal(given: list[WorkerSlot], order: list[int], now: float = 0.0) -> None:
    """Give a connection to the first worker of ``order`` whose turn it is."""
    taker = next(given[place] for place in order if given[place].take_turn(now))
    taker.add()


@settings(max_examples=10, deadline=None)
@given(number=st.sampled_from([1, 2, 3, 5, 8, 16, 64]), draw=st.data())
def test_no_worker_has_more_than_half_again_its_share(number: int, draw: st.DataObject) -> None:
    """However the kernel wakes them, of 200 connections no worker has more than 1.5 times its share."""
    _, given = workers(number)
    order = draw.draw(st.permutations(range(number)))
    for _ in range(200):
        deal(given, order)
    assert max(slot.connections for slot in given) <= 1.5 * 200 / number
    assert sum(slot.connections for slot in given) == 200


def test_a_worker_whose_connections_ended_is_next() -> None:
    """A worker whose connections have ended is next until it has as many as the others."""
    _, (one, other) = workers(2)
    for _ in range(20):
        deal([one, other], [0, 1])
    for _ in range(6):
        other.remove()
    assert not one.take_turn(0.0)
    assert other.take_turn(0.0)


def test_a_hung_worker_is_passed_over() -> None:
    """A worker that takes no connection for a while is passed over until it takes one itself."""
    _, (one, hung) = workers(2)
    one.add()
    assert not one.take_turn(0.0)
    assert not one.take_turn(HUNG_SECONDS / 2)
    assert one.take_turn(HUNG_SECONDS)
    one.add()
    assert one.take_turn(HUNG_SECONDS)  # and not a while for each
    one.add()
    hung.add()
    assert not one.take_turn(HUNG_SECONDS)


def test_a_worker_that_accepts_is_not_hung() -> None:
    """A worker counts as hung by the time since its last accepted connection, however long others wait."""
    _, (one, other) = workers(2)
    for _ in range(8):
        one.add()
    for turn in range(6):
        assert not one.take_turn(turn * 0.9 * HUNG_SECONDS)
        other.add()


def test_a_worker_that_ended_is_not_waited_for() -> None:
    """An ended or draining worker is not waited for; its successor begins with no connections."""
    balancer, (one, other) = workers(2)
    one.add()
    assert not one.take_turn(0.0)
    balancer.reclaim(other)
    assert one.take_turn(0.0)
    successor = balancer.assign()
    assert one.take_turn(0.0)  # it still starts
    successor.open()
    assert not one.take_turn(0.0)
    successor.close()
    assert one.take_turn(0.0)


def test_a_draining_worker_takes_what_nobody_else_would() -> None:
    """A draining worker takes connections (for a 503) only if no other worker serves."""
    _, (one, other) = workers(2)
    one.close()
    assert not one.take_turn(0.0)
    other.close()
    assert one.take_turn(0.0)


def test_the_table_is_shared_with_forked_workers() -> None:
    """The other workers see the counts that a forked worker writes."""
    _, (one, other) = workers(2)
    child = os.fork()
    if child == 0:
        try:
            for _ in range(3):
                one.add()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    for _ in range(4):
        other.add()
    assert not other.take_turn(0.0)
