"""A reader that does not follow: its request leaves the engine, and goes on, the same, when it reads again."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from long_requests import LENGTH, long, submit_paused
from processes import gone
from transport_place import HASTY, by_sequence, completion, eventually

from mlflow_llm.serving.interface.events import Finished
from mlflow_llm.serving.testing.instant_engine import InstantEngine
from mlflow_llm.serving.transport.client.event_stream import HIGH_EVENTS, LOW_EVENTS


@pytest.fixture
def bundle(make_bundle):
    return make_bundle(max_model_len=10**6)


def test_unread_requests_leave_the_engine(place, bundle):
    """Eight unread requests stop before their ends; another one runs; two are then read and whole, and the
    others, closed, leave nothing."""
    requests = [long(f"r{i}", prompt=(i, 1)) for i in range(8)]
    local = InstantEngine(bundle)
    with place.connect(bundle) as engine:
        streams = submit_paused(engine, *requests)
        waiting = [stream.buffer.events.qsize() for stream in streams]
        assert HIGH_EVENTS <= min(waiting) <= max(waiting) < LENGTH
        time.sleep(1.0)
        assert [stream.buffer.events.qsize() for stream in streams] == waiting
        other = completion("other", max_tokens=200)
        assert by_sequence(engine.submit(other)) == by_sequence(local.submit(other))
        for stream in streams[2:]:
            stream.close()
        for request, stream in zip(requests[:2], streams[:2], strict=True):
            assert by_sequence(stream) == by_sequence(local.submit(request))
        assert eventually(lambda: engine.health().num_running == 0)
    place.assert_clean()


@pytest.mark.parametrize("n", [1, 3])
def test_an_unsteady_reader_gets_everything(place, bundle, n):
    """Reading in bursts, paused again and again, gives the same tokens, ends and counts."""
    request = long(length=10 * HIGH_EVENTS, n=n)
    with place.connect(bundle) as engine:
        stream, found = engine.submit(request), []
        for event in stream:
            found.append(event)
            if random.random() < 0.002:
                time.sleep(0.05)
        assert by_sequence(found) == by_sequence(InstantEngine(bundle).submit(request))
    place.assert_clean()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_with_paused_requests(place, bundle, fault):
    """A request that was paused when its engine died or hung goes on in the next one, once it is read."""
    request = long(n=2)
    with place.connect(bundle, HASTY) as engine:
        (stream,) = submit_paused(engine, request)
        pid = engine.info.pid
        os.kill(pid, fault)
        if fault == signal.SIGKILL:
            assert eventually(lambda: gone(pid))
        assert by_sequence(stream) == by_sequence(InstantEngine(bundle).submit(request))
        assert engine.info.pid != pid
    place.assert_clean()


def test_ending_a_sequence_of_a_paused_request(place, bundle):
    """A sequence ended by its caller while the request is paused ends where it was; the other goes on."""
    with place.connect(bundle) as engine:
        (stream,) = submit_paused(engine, long(n=2))
        stream.finish(0)
        tokens, ends = by_sequence(stream)
        assert {i: e.reason for i, e in ends.items()} == {0: "abort", 1: "length"}
        assert len(tokens[1]) == LENGTH
    place.assert_clean()


def test_leaving_a_paused_request(place, bundle):
    """A paused request whose reader leaves is removed completely."""
    with place.connect(bundle) as engine:
        (stream,) = submit_paused(engine, long())
        stream.close()
        assert eventually(lambda: not engine.state.busy)
        assert isinstance(list(engine.submit(completion("next")))[-1], Finished)
    place.assert_clean()


def test_marks():
    """The engine is asked to go on long before the buffer is empty, and to pause long after that."""
    assert 0 < LOW_EVENTS < HIGH_EVENTS / 4
