"""A full queue refuses new requests, and none that has begun."""

from __future__ import annotations

import msgspec
import pytest
from long_requests import long, submit_paused
from transport_place import SETTINGS, by_sequence, completion

from mlflow_llm.serving.interface.engine import EngineInfo, Health
from mlflow_llm.serving.interface.events import Failed
from mlflow_llm.serving.testing.instant_engine import InstantEngine
from mlflow_llm.serving.transport import protocol as m
from mlflow_llm.serving.transport.client.protocol_state import ClientState

FULL = msgspec.structs.replace(SETTINGS, max_queued_requests=3, max_num_seqs=4)
INFO = EngineInfo(
    content_hash="x", tasks=("completions",), vocab_size=9, max_model_len=99, max_num_seqs=4, max_kv_tokens=99
)


class Sink:
    """A reader that records everything."""

    paused = is_full = is_drained = False

    def __init__(self):
        self.events = []

    def put(self, event):
        self.events.append(event)


def welcome(state, generation):
    """Have the engine welcome ``state`` as its client, and return what it is sent from then on."""
    state.hello("")
    state.outbox.clear()
    state.receive(m.encode(m.Welcome(generation, INFO, Health(status="ready"))))
    return submitted(state)


def submitted(state):
    """Take the submitted requests out of the outbox, and return for each whether it continues."""
    frames, state.outbox = list(state.outbox), type(state.outbox)()
    found = [message for message in map(m.decode_for_engine, frames) if isinstance(message, m.Submit)]
    return {message.request.request_id: message.continues for message in found}


@pytest.fixture
def bundle(make_bundle):
    return make_bundle(max_model_len=10**6, step_delay=0.004)


def test_a_paused_request_goes_on_in_a_full_queue(place, bundle):
    """A paused request continues after others have filled the queue, while a new one is refused."""
    with place.connect(bundle, FULL) as engine:
        (slow,) = submit_paused(engine, long("slow", 1500))
        others = [engine.submit(long(f"other-{i}", 10**6)) for i in range(3)]
        for other in others:
            next(other)
        assert [event.kind for event in engine.submit(completion("new"))] == ["overloaded"]
        assert by_sequence(slow) == by_sequence(InstantEngine(bundle).submit(long("slow", 1500)))
        for other in others:
            other.close()
    place.assert_clean()


def test_requests_go_on_at_a_full_replica(place, bundle):
    """Requests handed over to a replica with a full queue continue there, with or without tokens so far."""
    with place.connect(bundle, FULL, replica=1) as one, place.connect(bundle, FULL, replica=2) as two:
        moved = [one.submit(long(f"moved-{i}", 500)) for i in range(3)]
        first = [next(moved[0])]
        others = [two.submit(long(f"other-{i}", 10**6)) for i in range(3)]
        for other in others:
            next(other)
        for stream in moved:
            one.hand_over(stream, two)
        for i, stream in enumerate(moved):
            expected = by_sequence(InstantEngine(bundle).submit(long(f"moved-{i}", 500)))
            assert by_sequence([*(first if i == 0 else ()), *stream]) == expected
        for other in others:
            other.close()
    place.assert_clean()


def test_what_an_engine_was_given_continues_in_the_next():
    """A request given to an engine is marked as continuing in the next one, even without tokens; one made without an
    engine is new.
    """
    state = ClientState("client")
    assert welcome(state, "first") == {}
    state.submit(completion("old"), Sink())
    assert submitted(state) == {"old": False}
    state.disconnected()
    state.submit(completion("new"), Sink())
    assert welcome(state, "second") == {"old": True, "new": False}


def test_what_is_adopted_continues_if_it_had_begun():
    """A request handed over by a client that never had an engine is new, and otherwise continues."""
    had, never, other = ClientState("had"), ClientState("never"), ClientState("other")
    welcome(had, "first")
    welcome(other, "second")
    for state, name in ((had, "begun"), (never, "waiting")):
        running = state.release(state.submit(completion(name), Sink()))
        assert running is not None
        other.adopt(running)
    assert submitted(other) == {"begun": True, "waiting": False}


def test_a_message_without_the_mark_is_a_new_request():
    """A message without the mark is a new request, so that older clients of the protocol work."""
    request = completion()
    frame = msgspec.msgpack.encode(["submit", 7, request])
    assert m.decode_for_engine(frame) == m.Submit(7, request)


def test_the_instant_engine_refuses_new_requests_only(bundle):
    """If two requests exceed the queue's bound, the one that continues is accepted."""
    core = InstantEngine(bundle, FULL).core
    for i in range(3):
        core.add(completion(f"r{i}"), "")
    core.add(completion("new"), "")
    core.add(completion("old"), "", continues=True)
    failed = [request_id for _, request_id, event in core.step() if isinstance(event, Failed)]
    assert failed == ["new"]
    assert core.health().num_running == 4
