"""Adapters while their engine does not answer: they are known all the same, and no request waits for a look-up."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import gevent
import pytest
from gevent.event import Event
from instant_model import write_instant_model
from server_calls import BODY, ask, asking, engine_pid, idle, until
from serving_process import Running, running

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.engine import AdapterInfo
from mlflow_llm.serving.interface.errors import Unavailable
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.routing import adapter_poller
from mlflow_llm.serving.routing.adapter_poller import AdapterPoller
from mlflow_llm.serving.testing.instant_engine import InstantEngine
from mlflow_llm.serving.transport import attach

PIRATE = BODY | {"model": "assistant:pirate"}


class Absent(InstantEngine):
    """An engine that reports no adapters until ``here`` is set, and then fails while ``error`` is set."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle, EngineSettings(max_model_len=256))
        self.here = Event()
        self.error: Exception | None = None
        self.asked = 0

    def adapters(self) -> tuple[AdapterInfo, ...]:
        self.asked += 1
        self.here.wait()
        if self.error is not None:
            raise self.error
        return super().adapters()


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a server of two workers, each with room for two requests of which one runs."""
    bundle = write_instant_model(tmp_path_factory.mktemp("narrow"), step_delay=0.005)
    engine = EngineSettings(idle_timeout=0.3, stall_timeout=300.0, max_num_seqs=1)
    with running(bundle, workers=2, engine=engine, max_queued=1) as server:
        yield server


@contextmanager
def stopped(server: Running) -> Iterator[None]:
    """Stop the engine without its being considered dead yet."""
    until(lambda: idle(server))
    pid = engine_pid(server)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: idle(server))


def models(server: Running) -> list[str]:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=240) as answer:
        return [card["id"] for card in json.load(answer)["data"]]


def test_names_are_known_while_the_engine_is_away(instant_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the engine answers its model's adapters are known, then its own, even while it fails; it is asked one
    question at a time and none after closing.
    """
    monkeypatch.setattr(adapter_poller, "POLL_SECONDS", 0.01)
    engine = Absent(instant_bundle)
    engine.load_adapter("formal", instant_bundle.model_dir)
    names = AdapterPoller(engine, ("pirate",))
    gevent.sleep(0.1)
    assert (names(), names.answered.is_set(), engine.asked) == (("pirate",), False, 1)
    engine.here.set()
    assert names.answered.wait(240)
    assert names() == ("formal", "pirate")
    engine.unload_adapter("pirate")
    with gevent.Timeout(240):
        while names() != ("formal",):
            gevent.sleep(0.01)
    engine.error = Unavailable("the engine is not running")
    asked = engine.asked
    with gevent.Timeout(240):
        while engine.asked < asked + 3:
            gevent.sleep(0.01)
    assert names() == ("formal",)
    names.close()
    gevent.sleep(0.05)
    asked = engine.asked
    gevent.sleep(0.05)
    assert engine.asked == asked


def test_a_time_limit_holds_for_an_adapter(narrow: Running) -> None:
    """A request for an adapter, named either way, ends at its time limit while the engine is stopped."""
    with stopped(narrow):
        for path, body in (("/v1/chat/completions", PIRATE), ("/invocations", BODY | {"adapter": "pirate"})):
            with asking(narrow, body, path, {"X-Request-Timeout": "0.5"}) as answer:
                assert (answer.status, "timeout" in answer.read().decode()) == (504, True)
    until(lambda: ask(narrow, PIRATE)[0] == 200)  # not at once: the engine has yet to end what was given up


def test_a_full_queue_refuses_requests_for_an_adapter(narrow: Running) -> None:
    """If twelve requests for an adapter come at once, those beyond the room of two workers are refused immediately."""

    def call(_: int) -> int:
        with asking(narrow, PIRATE) as answer:
            return answer.status

    with ThreadPoolExecutor(12) as pool:
        with stopped(narrow):
            answers = [pool.submit(call, number) for number in range(12)]
            until(lambda: sum(answer.done() for answer in answers) >= 8)
            assert {answer.result() for answer in answers if answer.done()} == {503}
        found = Counter(answer.result() for answer in answers)
    assert set(found) <= {503, 200}


def test_an_unknown_adapter_is_not_found_without_the_engine(narrow: Running) -> None:
    """An unknown adapter, in ``model`` or ``adapter``, is a 404 without the engine, in small and large bodies."""
    with stopped(narrow):
        for named in ({"model": "assistant:nobody"}, {"adapter": "nobody"}):
            for padding in (0, 10_000):
                body = json.dumps(BODY | named).encode() + b" " * padding
                with asking(narrow, body, "/invocations") as answer:
                    assert (answer.status, b"pirate" in answer.read()) == (404, True)


def test_models_are_listed_without_the_engine(narrow: Running) -> None:
    """The list of models is answered while the engine is stopped."""
    with stopped(narrow):
        assert models(narrow) == ["assistant", "assistant:pirate"]


def test_an_adapter_of_another_client_is_found_soon(narrow: Running) -> None:
    """An adapter that another client loads into the engine is usable and listed in every worker soon, until it is
    unloaded.
    """
    (status,) = narrow.runtime.glob("*/status.json")
    with attach(str(Path(status).parent)) as other:
        other.load_adapter("formal", str(status.parent))
        until(lambda: all("assistant:formal" in models(narrow) for _ in range(20)))
        # the engine may still be ending what an earlier test's callers gave up: with one place, that is a 503
        until(lambda: ask(narrow, BODY | {"model": "assistant:formal"})[0] == 200)
        until(lambda: idle(narrow))
        other.unload_adapter("formal")
    assert ask(narrow, BODY | {"model": "assistant:formal"})[0] == 404  # by the engine, or by what is known already
    until(lambda: all("assistant:formal" not in models(narrow) for _ in range(20)))
