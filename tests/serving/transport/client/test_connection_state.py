"""The transition table of a client's connection, and the loop that moves by it."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from typing import get_args

import pytest
import zmq

from mlflow_llm.serving.transport.client import io_loop
from mlflow_llm.serving.transport.client.connection_state import TRANSITIONS, Happening, IllegalTransition, State, after
from mlflow_llm.serving.transport.client.io_loop import IoLoop
from mlflow_llm.serving.transport.client.poller import ThreadPoller
from mlflow_llm.serving.transport.client.protocol_state import ClientState


def test_the_table_knows_every_state_and_leads_nowhere_else() -> None:
    """Each state can be reached from the first one, and closed from there."""
    assert set(TRANSITIONS) == set(get_args(State))
    reached, states = {"disconnected"}, ["disconnected"]
    while states:
        for follower in TRANSITIONS[states.pop()].values():  # type: ignore[index]
            if follower not in reached:
                reached.add(follower)
                states.append(follower)
    assert reached == set(TRANSITIONS)
    assert {after(state, "closed") for state in TRANSITIONS} == {"closed"}


def test_an_illegal_move_raises() -> None:
    """A transition that the table does not list raises an error that names it."""
    legal = {(state, happening) for state, row in TRANSITIONS.items() for happening in row}
    for state, happening in itertools.product(get_args(State), get_args(Happening)):
        if (state, happening) not in legal:
            with pytest.raises(IllegalTransition, match=f"^{happening} while {state}$"):
                after(state, happening)


class ForgetfulFinder:
    """A finder of an engine of another generation each time; ``left`` has the generations it was asked to replace."""

    client_id, secret, failed_log = "", None, ""

    def __init__(self) -> None:
        self.left: list[str] = []
        self.generation = "1"

    def find(self, stalled: str, cancelled: Callable[[], bool]) -> str:
        self.left.append(stalled)
        self.generation = str(int(self.generation) + 1)
        return "inproc://engine"

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        pass


def test_an_engine_that_replaces_a_stalled_one_is_not_replaced_for_a_failed_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One search replaces a stalled generation; a later failed connection does not replace the new engine."""
    finder = ForgetfulFinder()
    loop = IoLoop(ThreadPoller(), finder, ClientState("c"), stall_timeout=60.0, keep=True, rest=lambda: None)

    def refuse(*args: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(io_loop, "Connection", refuse)
    loop.phase = "stalled"
    for _ in range(2):
        loop.search()
    assert finder.left == ["1", ""]
    assert loop.phase == "disconnected"
    loop.close()
    loop.close()
    assert loop.phase == "closed"
