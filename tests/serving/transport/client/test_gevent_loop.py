"""The client's loop as a greenlet: what its engine sends is delivered without waking it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
import zmq
from transport_place import completion

from mlflow_llm.serving.interface.engine import EngineInfo, Health
from mlflow_llm.serving.interface.events import Event, Failed, Tokens
from mlflow_llm.serving.transport import protocol as m
from mlflow_llm.serving.transport.client import io_loop
from mlflow_llm.serving.transport.client.gevent_client import GeventPoller
from mlflow_llm.serving.transport.client.io_loop import IoLoop
from mlflow_llm.serving.transport.client.poller import ThreadPoller
from mlflow_llm.serving.transport.client.protocol_state import ClientState

INFO = EngineInfo(
    content_hash="", tasks=("completions",), vocab_size=9, max_model_len=99, max_num_seqs=9, max_kv_tokens=99
)


class Reader(list[Event]):
    """A reader; ``fails`` is what it raises for the next event."""

    paused, is_full, is_drained = False, False, False
    fails: Exception | None = None

    def put(self, event: Event) -> None:
        if self.fails is not None:
            self.fails, error = None, self.fails
            raise error
        self.append(event)


class OneEngine:
    """A finder of one engine, which the test plays on ``socket``."""

    client_id, secret, failed_log, generation = "", None, "", "1"

    def __init__(self, path: Path) -> None:
        self._context: Any = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.endpoint = f"ipc://{path}/e"
        self.socket.bind(self.endpoint)
        self.client = b""

    def find(self, stalled: str, cancelled: Callable[[], bool]) -> str:
        return self.endpoint

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()

    def hears(self) -> m.ToEngine:
        until(lambda: self.socket.poll(0))
        self.client, frame = self.socket.recv_multipart()
        return m.decode_for_engine(frame)

    def says(self, *messages: m.ToClient) -> None:
        for message in messages:
            self.socket.send_multipart([self.client, m.encode(message)])


def until(what: Callable[[], object]) -> None:
    with gevent.Timeout(60):
        while not what():
            gevent.sleep(0.001)


@pytest.fixture
def engine(tmp_path: Path) -> OneEngine:
    return OneEngine(tmp_path)


class Loop(IoLoop):
    turns = 0

    def _turn(self) -> None:
        self.turns += 1
        super()._turn()


@pytest.fixture
def loop(engine: OneEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    """Yield a connected loop with one request, which ``reader`` reads; no timer wakes it."""
    monkeypatch.setattr(io_loop, "CHECK_SECONDS", 3600.0)
    state = ClientState("c")
    made = Loop(GeventPoller(), engine, state, stall_timeout=60.0, keep=True, rest=lambda: gevent.sleep(0))
    running = gevent.spawn(made.run)
    try:
        assert isinstance(engine.hears(), m.Hello)
        engine.says(m.Welcome("1", INFO, Health(status="ready")))
        until(lambda: made.phase == "connected")
        yield made
    finally:
        made.stop()
        running.join(60)


def submit(loop: Loop, engine: OneEngine) -> Reader:
    reader = Reader()
    loop.post(lambda state: state.submit(completion("a", max_tokens=50), reader))
    assert isinstance(engine.hears(), m.Submit)
    gevent.idle()
    return reader


def events(*tokens: int) -> list[m.Events]:
    return [m.Events(token, ((1, Tokens(0, (token,))),)) for token in tokens]


def test_events_are_delivered_without_a_turn_of_the_loop(loop: Loop, engine: OneEngine) -> None:
    """Events are delivered in order without a turn of the loop, by the callback that finds them readable."""
    reader = submit(loop, engine)
    before = loop.turns
    for token in range(5):
        engine.says(*events(token))
        until(lambda count=token + 1: len(reader) == count)
    assert reader == [Tokens(0, (token,)) for token in range(5)]
    assert loop.turns == before


def test_events_that_need_an_answer_wake_the_loop(loop: Loop, engine: OneEngine) -> None:
    """A reader that falls behind has its request paused with nothing else to wake the loop, and the engine's last
    message ends the connection.
    """
    reader = submit(loop, engine)
    loop.state.resumes = True
    reader.is_full = True
    engine.says(*events(1))
    assert engine.hears() == m.Finish(1, 0)
    engine.says(m.Closing("over"))
    assert isinstance(engine.hears(), m.Hello)


def test_more_than_fits_into_a_turn_is_taken_by_the_loop(loop: Loop, engine: OneEngine) -> None:
    """The loop takes frame after frame until none is left before it waits, since ZeroMQ signals only once."""
    reader = submit(loop, engine)
    engine.says(*events(*range(100)))
    until(lambda: len(reader) == 100)
    assert [event.token_ids for event in reader if isinstance(event, Tokens)] == [(token,) for token in range(100)]


def test_an_exception_during_delivery_ends_the_loop(
    loop: Loop, engine: OneEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception while events are delivered ends the loop and fails its running requests."""
    reader = submit(loop, engine)
    reader.fails = ZeroDivisionError("broken")
    engine.says(*events(1))
    until(lambda: reader)
    (failed,) = reader
    assert isinstance(failed, Failed)
    assert failed.kind == "engine_died"
    assert loop.stopping
    assert "the engine's client ends" in caplog.text


class NeverPolled(ThreadPoller):
    def poll(self, seconds: float, take: Callable[[int], bool]) -> Collection[int]:
        pytest.fail("it waits though all has come")


def test_a_welcome_between_two_turns_is_seen_in_the_next(tmp_path: Path) -> None:
    """A welcome between two turns connects the loop in the next one, without another message or a timeout."""
    engine = OneEngine(tmp_path)

    def answer() -> None:
        if loop.phase == "connecting" and not loop.state.welcome:
            assert isinstance(engine.hears(), m.Hello)
            engine.says(m.Welcome("1", INFO, Health(status="ready")))
            until(lambda: loop.connection is not None and loop.connection.socket.poll(0))

    loop = Loop(NeverPolled(), engine, ClientState("c"), stall_timeout=60.0, keep=True, rest=answer)
    try:
        loop.open()
        assert loop.phase == "connected"
    finally:
        loop.close()


def test_a_responding_engine_is_not_searched_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's lock is checked only while it is silent, and an engine whose lock is free is given up."""
    engine = OneEngine(tmp_path)
    monkeypatch.setattr(io_loop, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(engine, "alive", lambda: False)
    loop = Loop(GeventPoller(), engine, ClientState("c"), stall_timeout=60.0, keep=True, rest=lambda: gevent.sleep(0))
    loop.connect()
    for _ in range(10 * io_loop.DEAD_TURNS):
        loop.state.progressed = True
        assert not loop.is_dead()
    loop.state.progressed = False
    assert [loop.is_dead() for _ in range(io_loop.DEAD_TURNS + 1)] == [False] * io_loop.DEAD_TURNS + [True]
    loop.close()
