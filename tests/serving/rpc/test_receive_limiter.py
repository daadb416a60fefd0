"""Messages that come at once: no more of them than the memory budget has room for."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.frontend.limits.memory_budget import MemoryBudget
from mlflow_llm.serving.interface.errors import Aborted, LimitExceeded, Overloaded
from mlflow_llm.serving.rpc.messages import ModelInferRequest
from mlflow_llm.serving.rpc.receive_limiter import Message, ReceiveLimiter


class _Call:
    """A call as the limiter sees it."""

    def __init__(self) -> None:
        self.is_over = False
        self.cancelled = threading.Event()
        self.context = self

    def cancel(self) -> None:
        self.cancelled.set()


def call() -> Any:
    return _Call()


def test_largest_messages_are_limited_by_room() -> None:
    """Messages of 16 MiB are received up to 128 MiB, 32 MiB of one caller; one that may exceed it is received alone."""
    found = ReceiveLimiter.of(ServerSettings())
    assert (found.total, found.per_caller) == (8, 2)
    one = ReceiveLimiter.of(ServerSettings(max_body_bytes=2**30))
    assert (one.total, one.per_caller) == (2, 1)


def test_calls_wait_for_a_free_permit() -> None:
    """Never more of 256 concurrent calls than there are permits are received, and all are in the end."""
    limiter = ReceiveLimiter(total=3, per_caller=1, max_wait=600)
    lock, now, maximum = threading.Lock(), 0, 0

    def come(number: int) -> None:
        nonlocal now, maximum
        with limiter.permit(call(), f"caller {number % 9}") as permit:
            with lock:
                now += 1
                maximum = max(maximum, now)
            with lock:
                now -= 1
            permit.release()
            permit.release()

    threads = [threading.Thread(target=come, args=(number,)) for number in range(256)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert maximum <= 3
    assert not limiter.permits


def test_a_callers_own_turns_are_bounded() -> None:
    """A caller that holds all its own permits waits for itself, and others do not wait for it."""
    limiter = ReceiveLimiter(total=3, per_caller=1, max_wait=0.0)
    with limiter.permit(call(), "a"):
        with pytest.raises(Overloaded), limiter.permit(call(), "a"):
            pass
        with limiter.permit(call(), "b"):
            pass
    with limiter.permit(call(), "a"):
        pass


def test_a_silent_call_is_cancelled_when_others_wait() -> None:
    """A client that sends nothing loses its permit when another has waited; one whose message has arrived does not."""
    limiter = ReceiveLimiter(total=2, per_caller=1, max_wait=0.01)
    slow, here = call(), call()
    with limiter.permit(slow, "a") as late, limiter.permit(here, "b") as permit:
        permit.arrived = True
        late.since = permit.since = -1e9
        gone = call()
        gone.is_over = True
        with pytest.raises(Aborted), limiter.permit(gone, "c"):
            pass
        limiter.max_wait = 600.0
        got = threading.Event()

        def come() -> None:
            with limiter.permit(call(), "c"):
                got.set()

        comes = threading.Thread(target=come)
        comes.start()
        assert slow.cancelled.wait(60)
        late.release()
        assert got.wait(60)
        comes.join(60)
    assert not here.cancelled.is_set()


def test_a_permit_ends_when_the_memory_budget_decides() -> None:
    """A permit ends when the memory budget has counted or refused the message, whose id is then known."""
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
