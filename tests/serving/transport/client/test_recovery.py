"""An engine that dies or hangs costs a pause: text and counts are what they would have been."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import msgspec
import pytest
from processes import gone
from transport_place import HASTY, SETTINGS, by_sequence, completion, eventually

from mlflow_llm.serving.interface.events import Failed, Finished
from mlflow_llm.serving.testing.instant_engine import InstantEngine
from mlflow_llm.serving.transport.client.protocol_state import MAX_RESTARTS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("n", [1, 3])
def test_killed_engine_loses_nothing(place, make_bundle, n, temperature):
    """After two kill -9 at random points several requests have the same tokens, ends and counts as without."""
    bundle = make_bundle(step_delay=0.004)
    requests = [
        completion(f"r{i}", max_tokens=60 + 20 * i, n=n, temperature=temperature, prompt=(i, 1)) for i in range(4)
    ]
    local = InstantEngine(bundle)
    expected = [by_sequence(local.submit(request)) for request in requests]
    with place.connect(bundle) as engine:
        got = [None] * len(requests)

        def read(i):
            got[i] = by_sequence(engine.submit(requests[i]))

        readers = [threading.Thread(target=read, args=(i,)) for i in range(len(requests))]
        for reader in readers:
            reader.start()
        for _ in range(2):
            assert eventually(lambda: engine.health().num_running > 0 or not any(r.is_alive() for r in readers))
            time.sleep(random.uniform(0.0, 0.15))
            pid = engine.info.pid
            os.kill(pid, signal.SIGKILL)
            assert eventually(lambda pid=pid: gone(pid))
            assert eventually(lambda pid=pid: engine.info.pid != pid or not any(r.is_alive() for r in readers))
        for reader in readers:
            reader.join(240)
        assert got == expected
    place.assert_clean()


@pytest.mark.parametrize("known", [False, True])
def test_cached_tokens_are_those_of_the_first_attempt(place, make_bundle, known):
    """The reported number of cached tokens is that of the first attempt, whichever engine ends the request."""
    bundle = make_bundle(step_delay=0.004, prefix_cache=True)
    with place.connect(bundle) as engine:
        if known:
            list(engine.submit(completion("before", max_tokens=1, prompt=(5, 6, 7, 8))))
        pid = engine.info.pid
        stream = engine.submit(completion(max_tokens=60, temperature=0.0, prompt=(5, 6, 7, 8)))
        first = next(stream)
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: engine.info.pid != pid)
        if not known:  # the second engine knows the prompt by now
            list(engine.submit(completion("other", max_tokens=1, prompt=(5, 6, 7, 8))))
        _, ends = by_sequence([first, *stream])
        assert ends[0].num_cached_tokens == (3 if known else 0)
    place.assert_clean()


def test_hung_engine_is_replaced(place, make_bundle):
    """An engine that stands still with work is killed after stall_timeout and its request goes on elsewhere."""
    bundle = make_bundle(step_delay=0.003)
    with place.connect(bundle, HASTY) as engine:
        pid = engine.info.pid
        stream = engine.submit(completion(max_tokens=200))
        first = next(stream)
        os.kill(pid, signal.SIGSTOP)
        assert by_sequence([first, *stream]) == by_sequence(InstantEngine(bundle).submit(completion(max_tokens=200)))
        assert engine.info.pid != pid
    place.assert_clean()


def test_an_engine_that_hangs_grows_older(place, make_bundle):
    """The age of a hanging engine's last step grows until it goes on, and the rest of its health stays."""
    with place.connect(
        make_bundle(step_delay=0.02, max_model_len=10**7)
    ) as engine:  # slow enough not to be paused soon
        stream = engine.submit(completion(max_tokens=10**6))
        next(stream)
        assert eventually(lambda: engine.health().num_running == 1 and engine.health().last_step_age < 0.7)
        os.kill(engine.info.pid, signal.SIGSTOP)
        try:
            assert eventually(lambda: engine.health().last_step_age > 1.5)
            assert (engine.health().status, engine.health().num_running) == ("ready", 1)
        finally:
            os.kill(engine.info.pid, signal.SIGCONT)
        assert eventually(lambda: engine.health().last_step_age < 0.7)
        stream.close()
    place.assert_clean()


def test_nothing_runs_in_an_engine_that_is_away(place, make_bundle):
    """A dead engine has no running or waiting requests, and its counts are kept by generation."""
    settings = msgspec.structs.replace(SETTINGS, max_num_seqs=1)
    bundle = make_bundle(step_delay=0.02, load_delay=1.0, max_model_len=10**7)  # so slow that no stream is soon paused
    with place.connect(bundle, settings) as engine:
        streams = [engine.submit(completion(f"r{i}", max_tokens=10**6)) for i in range(3)]
        next(streams[0])
        assert eventually(lambda: engine.health().num_waiting == 2)
        first = engine.generation
        os.kill(engine.info.pid, signal.SIGKILL)
        assert eventually(lambda: engine.health().status == "starting")
        away = engine.health()
        assert (away.num_running, away.num_waiting, away.num_provisioned, away.kv_tokens_used) == (0, 0, 0, 0)
        assert away.steps > 0
        assert eventually(lambda: engine.health().last_step_age > away.last_step_age > 0)
        assert eventually(lambda: engine.health().num_waiting == 2)
        assert list(engine.process_health()) == [first, engine.generation]
        assert engine.process_health()[first].generated_tokens == away.generated_tokens
        for stream in streams:
            stream.close()
    place.assert_clean()


def test_two_clients_one_successor(place, make_bundle):
    """Two clients of a dead shared engine, in two processes, share one successor."""
    bundle = make_bundle(step_delay=0.003)
    with place.connect(bundle) as engine:
        code = """
            stream = engine.submit(request(300)); next(stream); print('on', flush=True)
            print(len(list(stream)), engine.info.pid, flush=True); sys.stdin.readline()
            """
        child = place.run(code, bundle)
        assert child.stdout.readline().strip() == "on"
        stream = engine.submit(completion(max_tokens=300))
        next(stream)
        os.kill(engine.info.pid, signal.SIGKILL)
        assert isinstance(list(stream)[-1], Finished)
        assert child.stdout.readline().split() == ["300", str(engine.info.pid)]
        assert len(place.engines()) == 1
        child.kill()
    place.assert_clean()


def test_poison_is_given_up(place, make_bundle):
    """A request that kills every engine it meets fails after a few, and the client works on."""
    bundle = make_bundle(poison_token_id=666)
    with place.connect(bundle) as engine:
        events = list(engine.submit(completion(prompt=(666,))))
        assert [event.kind for event in events] == ["ends_engines"]
        assert str(MAX_RESTARTS + 1) in events[0].message
        assert isinstance(list(engine.submit(completion()))[-1], Finished)
    place.assert_clean()


def test_adapters_survive(place, make_bundle, tmp_path):
    """An adapter loaded at run time by one client serves the other, also after the engine was killed."""
    (tmp_path / "a").mkdir()
    bundle = make_bundle()
    with place.connect(bundle) as one, place.connect(bundle) as two:
        assert one.load_adapter("formal", str(tmp_path / "a")).name == "formal"
        assert [adapter.name for adapter in two.adapters()] == ["formal"]
        os.kill(one.info.pid, signal.SIGKILL)
        assert eventually(lambda: not place.engines())
        assert [adapter.name for adapter in two.adapters()] == ["formal"]
        two.unload_adapter("formal")
        assert one.adapters() == ()
    place.assert_clean()


def test_closed_client_ends_its_requests(place, make_bundle):
    """Closing a client ends its streams with shutting_down, and later ones at once."""
    engine = place.connect(make_bundle(step_delay=0.003))
    stream = engine.submit(completion(max_tokens=10**5))
    next(stream)
    engine.close()
    engine.close()
    assert [e.kind for e in stream if isinstance(e, Failed)] == ["shutting_down"]
    assert [e.kind for e in engine.submit(completion())] == ["shutting_down"]
    assert engine.health().status == "dead"
    place.assert_clean()


def test_finish_one_sequence(place, make_bundle):
    """One sequence of a request ends alone; the other runs to its end."""
    with place.connect(make_bundle(step_delay=0.02)) as engine:
        stream = engine.submit(completion(max_tokens=100, n=2))
        events = [next(stream)]
        stream.finish(0)
        _, ends = by_sequence([*events, *stream])
        assert {i: e.reason for i, e in ends.items()} == {0: "abort", 1: "length"}
    place.assert_clean()


def test_hung_before_the_welcome(place, make_bundle):
    """A client that meets an engine that hangs replaces it instead of waiting for its welcome for ever."""
    bundle = make_bundle()
    with place.connect(bundle, HASTY) as first:
        os.kill(first.info.pid, signal.SIGSTOP)
        with place.connect(bundle, HASTY) as second:
            assert second.info.pid != first.info.pid or eventually(lambda: first.info.pid == second.info.pid)
            assert isinstance(list(second.submit(completion()))[-1], Finished)
    place.assert_clean()
