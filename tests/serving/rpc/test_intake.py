"""Messages that come at once: no more of them than the memory budget has room for."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.frontend.memory_budget import MemoryBudget
from mlflow_llm.serving.interface.errors import Aborted, LimitExceeded, Overloaded
from mlflow_llm.serving.rpc.messages import ModelInferRequest
from mlflow_llm.serving.rpc.receive_limiter import Intake, Message


class _Call:
    """A call as the intake sees it."""

    def __init__(self) -> None:
        self.is_over = False
        self.cancelled = threading.Event()
        self.context = self

    def cancel(self) -> None:
        self.cancelled.set()


def call() -> Any:
    return _Call()


def test_largest_messages_are_limited_by_room() -> None:
    """Messages of 16 MiB are received up to 128 MiB, 32 MiB of one caller; one that may exceed all of it is received
    alone.
    """
    found = Intake.of(ServerSettings())
    assert (found._total, found._by_caller) == (8, 2)
    one = Intake.of(ServerSettings(max_body_bytes=2**30))
    assert (one._total, one._by_caller) == (2, 1)


def test_calls_wait_for_a_free_turn() -> None:
    """Of 256 concurrent calls never more than the available turns are received, and all are in the end."""
    intake = Intake(total=3, by_caller=1, patience=600)
    lock, now, most = threading.Lock(), 0, 0

    def come(number: int) -> None:
        nonlocal now, most
        with intake.turn(call(), f"caller {number % 9}") as turn:
            with lock:
                now += 1
                most = max(most, now)
            with lock:
                now -= 1
            turn.end()
            turn.end()

    threads = [threading.Thread(target=come, args=(number,)) for number in range(256)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert most <= 3
    assert not intake._turns


def test_a_callers_own_turns_are_bounded() -> None:
    """A caller that fills its own turns waits for itself, and others do not wait for it."""
    intake = Intake(total=3, by_caller=1, patience=0.0)
    with intake.turn(call(), "a"):
        with pytest.raises(Overloaded), intake.turn(call(), "a"):
            pass
        with intake.turn(call(), "b"):
            pass
    with intake.turn(call(), "a"):
        pass


def test_a_silent_call_is_cancelled_when_others_wait() -> None:
    """A client that sends nothing holds its turn only until another has waited long enough; once a message arrives it
    keeps it.
    """
    intake = Intake(total=2, by_caller=1, patience=0.01)
    slow, here = call(), call()
    with intake.turn(slow, "a") as late, intake.turn(here, "b") as turn:
        turn.has_come = True
        late.since = turn.since = -1e9
        gone = call()
        gone.is_over = True
        with pytest.raises(Aborted), intake.turn(gone, "c"):
            pass
        intake._patience = 600.0
        got = threading.Event()

        def come() -> None:
            with intake.turn(call(), "c"):
                got.set()

        comes = threading.Thread(target=come)
        comes.start()
        assert slow.cancelled.wait(60)
        late.end()
        assert got.wait(60)
        comes.join(60)
    assert not here.cancelled.is_set()


def test_a_turn_ends_when_the_memory_budget_decides() -> None:
    """A turn ends when the memory budget has counted or refused the message, whose id is then known."""
    data = ModelInferRequest(id="mine", model_name="m", model_version="2").SerializeToString()
    ended: list[bool] = []
    message = Message(data, lambda: ended.append(True))
    assert message.address() == ("m", "2")
    budget = MemoryBudget(total=2**20, by_caller=2**20)
    with budget.allocate("a") as allocation:
        assert message.receive(allocation) == data
    assert (message.data, message.id, message.size, ended) == (b"", "mine", len(data), [True])
    large = Message(b"\xff" * 2**20, lambda: ended.append(True))
    with budget.allocate("a") as first, budget.allocate("a") as second:
        first.grow(2**19)
        with pytest.raises(LimitExceeded):
            large.receive(second)
    assert (large.data, large.id, len(ended)) == (b"", "", 2)
