"""Whose turn it is to take a connection, by the table that all workers see."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from mlflow_llm.serving.http.gunicorn.accept_balancing import PATIENCE, Share, Shares


def workers(number: int) -> tuple[Shares, list[Share]]:
    shares = Shares(number)
    given = [shares.give() for _ in range(number)]
    for share in given:
        share.open()
    return shares, given


def deal(given: list[Share], order: list[int], now: float = 0.0) -> None:
    """A connection for the first worker of ``order`` whose turn it is."""
    taker = next(given[place] for place in order if given[place].is_due(now))
    taker.add()


@settings(max_examples=10, deadline=None)
@given(number=st.sampled_from([1, 2, 3, 5, 8, 16, 64]), draw=st.data())
def test_no_worker_has_more_than_half_again_its_share(number: int, draw: st.DataObject) -> None:
    """However the kernel wakes them, of 200 connections no worker has more than 1.5 times its share."""
    _, given = workers(number)
    order = draw.draw(st.permutations(range(number)))
    for _ in range(200):
        deal(given, order)
    assert max(share._number for share in given) <= 1.5 * 200 / number
    assert sum(share._number for share in given) == 200


def test_connections_that_end_are_made_up_for() -> None:
    """A worker whose connections have ended is next until it has as many as the others."""
    _, (one, other) = workers(2)
    for _ in range(20):
        deal([one, other], [0, 1])
    for _ in range(6):
        other.remove()
    assert not one.is_due(0.0)
    assert other.is_due(0.0)


def test_a_worker_that_hangs_is_passed_over() -> None:
    """After a while without a connection taken, others take what was left to it, until it takes one itself."""
    _, (one, hung) = workers(2)
    one.add()
    assert not one.is_due(0.0)
    assert not one.is_due(PATIENCE / 2)
    assert one.is_due(PATIENCE)
    one.add()
    assert one.is_due(PATIENCE)  # and not a while for each
    one.add()
    hung.add()
    assert not one.is_due(PATIENCE)


def test_a_worker_that_takes_connections_does_not_hang() -> None:
    """However long others wait, time counts from the last connection that was taken."""
    _, (one, other) = workers(2)
    for _ in range(8):
        one.add()
    for turn in range(6):
        assert not one.is_due(turn * 0.9 * PATIENCE)
        other.add()


def test_a_worker_that_ended_is_not_waited_for() -> None:
    """Neither one whose slot was taken back, nor one that drains; its successor begins with none."""
    shares, (one, other) = workers(2)
    one.add()
    assert not one.is_due(0.0)
    shares.take_back(other)
    assert one.is_due(0.0)
    successor = shares.give()
    assert one.is_due(0.0)  # it still starts
    successor.open()
    assert not one.is_due(0.0)
    successor.close()
    assert one.is_due(0.0)


def test_a_draining_worker_takes_what_nobody_else_would() -> None:
    """While all drain, each answers (with a 503); while another serves, that one has the connection."""
    _, (one, other) = workers(2)
    one.close()
    assert not one.is_due(0.0)
    other.close()
    assert one.is_due(0.0)


def test_the_table_is_shared_with_children() -> None:
    """What a forked worker writes is seen by the others."""
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
    assert not other.is_due(0.0)
