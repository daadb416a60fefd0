"""A request keeps its one id on its way to the engine and into its journal; connections speak of it by numbers."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
from offline_server import ONE, TWO, Server, offline_server
from transport_place import completion

from mlflow_llm.serving.interface.events import Failed, Finished, Tokens
from mlflow_llm.serving.system.journal import journals
from mlflow_llm.serving.transport import protocol as m
from mlflow_llm.serving.transport.client.event_stream import EventBuffer
from mlflow_llm.serving.transport.client.protocol_state import ClientState


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with offline_server(tmp_path) as found:
        yield found


def test_numbers_are_a_connections_own(server: Server) -> None:
    """Two clients may use the same request number, and each gets the events of its own request."""
    server.handle(ONE, m.Submit(1, completion("a", max_tokens=2)))
    server.handle(TWO, m.Submit(1, completion("b", max_tokens=3)))
    server.run_out()
    for identity, count in ((ONE, 2), (TWO, 3)):
        events = server.events(identity)
        assert {number for number, _ in events} == {1}
        assert sum(len(event.token_ids) for _, event in events if isinstance(event, Tokens)) == count


def test_the_journal_has_the_id_that_the_ledger_has(server: Server, tmp_path: Path) -> None:
    """The journal has the ledger's request id unchanged, whatever it consists of."""
    for number, name in enumerate(("req@x.1", "3f", "req-9")):
        server.handle(ONE, m.Submit(number, completion(name, max_tokens=number + 1)))
    server.run_out()
    (journal,) = journals(tmp_path / "journal")
    found, _ = journal.ended(0, 10)
    assert {(one.request_id, one.tokens) for one in found} == {("req@x.1", 1), ("3f", 2), ("req-9", 3)}


def test_a_request_runs_once(server: Server) -> None:
    """A request handed over before its abort ends on the first connection, and the late abort does not end the second
    attempt.
    """
    request = completion("a", max_tokens=4)
    server.handle(ONE, m.Submit(5, request))
    server.core.step()
    server.handle(TWO, m.Submit(9, request, True))
    server.handle(ONE, m.Abort(5))
    server.run_out()
    ((number, failed),) = server.events(ONE)
    assert (number, failed.kind) == (5, "aborted")
    assert isinstance(failed, Failed)
    events = server.events(TWO)
    assert {number for number, _ in events} == {9}
    assert sum(len(event.token_ids) for _, event in events if isinstance(event, Tokens)) == 4
    assert isinstance(events[-1][1], Finished)
    assert not server.clients


def test_a_client_sends_the_id_as_it_is(server: Server) -> None:
    """A client sends the request id unchanged, also after a handover, when the number differs."""
    one, two = ClientState("one"), ClientState("two")
    for state in (one, two):
        state.hello("")
        state.receive(m.encode(m.Welcome("g", server.info, server.core.health())))
        state.outbox.clear()
    two.submit(completion("other"), _sink())
    running = one.release(one.submit(completion("a"), _sink()))
    assert running is not None
    two.adopt(running)
    sent = [m.decode_for_engine(frame) for frame in (*one.outbox, *two.outbox)]
    submitted = [(message.number, message.request.request_id) for message in sent if isinstance(message, m.Submit)]
    assert submitted == [(1, "a"), (1, "other"), (2, "a")]


def _sink() -> EventBuffer:
    return EventBuffer(queue.SimpleQueue(), 1)
