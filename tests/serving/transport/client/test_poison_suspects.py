"""A request on which engines die is given up; those that ran beside it are not."""

from __future__ import annotations

import msgspec
import pytest
from transport_place import by_sequence, completion

from mlflow_llm.serving.interface.engine import EngineInfo, Health
from mlflow_llm.serving.interface.errors import Unavailable
from mlflow_llm.serving.interface.events import Failed, Finished
from mlflow_llm.serving.testing.instant_engine import InstantEngine
from mlflow_llm.serving.transport import protocol as m
from mlflow_llm.serving.transport.client.protocol_state import MAX_RESTARTS, SUSPECT_RESTARTS, ClientState

INFO = EngineInfo(
    content_hash="x", tasks=("completions",), vocab_size=9, max_model_len=99, max_num_seqs=9, max_kv_tokens=99
)


class Sink(list):
    """A sink of one request's events."""

    paused, is_full, is_drained = False, False, True
    put = list.append


class Engines:
    """A series of engines that die as soon as they have one of ``poison``; all others first give one token."""

    def __init__(self, state: ClientState, poison: set[str]) -> None:
        self.state, self.poison, self.deaths = state, poison, 0

    def live(self) -> None:
        """Run one engine until nothing is left to do or it dies."""
        self.state.hello("c")
        self.state.receive(m.encode(m.Welcome(f"g{self.deaths}", INFO, Health(status="ready"))))
        while batch := self.submitted():
            if any(message.request.request_id in self.poison for message in batch):
                self.deaths += 1
                self.state.disconnected()
                return
            for message in batch:
                self.state.receive(m.encode(m.Events(1, ((message.number, Finished(0, "length", 0, 1)),))))

    def submitted(self) -> list[m.Submit]:
        """Return all requests that came since the last step, and so are together in the engine."""
        frames = [m.decode_for_engine(frame) for frame in self.state.outbox]
        self.state.outbox.clear()
        return [frame for frame in frames if isinstance(frame, m.Submit)]


@pytest.mark.parametrize("poison", [{"r0"}, {"r2"}, {"r4"}, {"r1", "r3"}, {f"r{i}" for i in range(5)}])
def test_only_those_that_end_engines_are_given_up(poison: set[str]) -> None:
    """If requests run together on dying engines only those that kill them fail for good, at the cost of a few
    engines each.
    """
    state = ClientState("c")
    engines, sinks = Engines(state, poison), {f"r{i}": Sink() for i in range(5)}
    for name, sink in sinks.items():
        state.submit(completion(name), sink)
    for _ in range(50):
        if not state.busy:
            break
        engines.live()
    assert {name for name, sink in sinks.items() if isinstance(sink[-1], Finished)} == set(sinks) - poison
    assert [sinks[name][-1].kind for name in sorted(poison)] == ["ends_engines"] * len(poison)
    assert engines.deaths <= SUSPECT_RESTARTS + len(poison) * (MAX_RESTARTS + 1 - SUSPECT_RESTARTS)


@pytest.mark.parametrize("end", ["abort", "release", "finish"])
def test_others_do_not_wait_for_a_suspect_that_left(end: str) -> None:
    """A suspect that is aborted, handed to another replica or ended while it runs alone lets the others run."""
    state = ClientState("c")
    first, second = (state.submit(completion(name), Sink()) for name in ("a", "b"))
    engines = Engines(state, {"a", "b"})
    for _ in range(SUSPECT_RESTARTS):
        engines.live()
    state.hello("c")
    state.receive(m.encode(m.Welcome("g", INFO, Health(status="ready"))))
    assert [message.number for message in engines.submitted()] == [first]
    late = state.submit(completion("late"), Sink())
    assert engines.submitted() == []
    if end == "finish":
        state.finish(first, 0)
        state.receive(m.encode(m.Events(1, ((first, Finished(0, "abort", 0, 1)),))))
    else:
        getattr(state, end)(first)
    assert [message.number for message in engines.submitted()] == [second]
    state.receive(m.encode(m.Events(1, ((second, Failed("internal", "x")),))))
    assert [message.number for message in engines.submitted()] == [late]


def test_no_request_waits_after_all_have_failed() -> None:
    """After all requests have failed a new one does not wait for an earlier suspect."""
    state = ClientState("c")
    engines = Engines(state, {"a"})
    state.submit(completion("a"), Sink())
    for _ in range(SUSPECT_RESTARTS):
        engines.live()
    state.hello("c")
    state.receive(m.encode(m.Welcome("g", INFO, Health(status="ready"))))
    state.fail_all(Unavailable("none"))
    engines.submitted()
    late = state.submit(completion("late"), Sink())
    assert [message.number for message in engines.submitted()] == [late]


def test_the_others_get_their_tokens(place, make_bundle) -> None:
    """Requests beside one that kills real engines get the tokens of an undisturbed run."""
    bundle = make_bundle(poison_token_id=666, step_delay=0.002)
    requests = [completion(f"r{i}", prompt=(i, 1)) for i in range(4)]
    expected = [by_sequence(InstantEngine(bundle).submit(request)) for request in requests]
    with place.connect(bundle) as engine:
        before = [engine.submit(request) for request in requests[:2]]
        bad = engine.submit(completion("bad", prompt=(666,)))
        after = [engine.submit(msgspec.structs.replace(request)) for request in requests[2:]]
        assert [by_sequence(stream) for stream in (*before, *after)] == expected
        assert [event.kind for event in bad] == ["ends_engines"]
    place.assert_clean()
