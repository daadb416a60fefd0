"""A real server whose engine has a standby: ``kill -9`` of the engine under load."""

from __future__ import annotations

import os
import signal
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from counting_core import CORE, Truth, importable
from instant_model import write_instant_model
from processes import gone
from scrapes import figures, pick
from server_calls import asking, engine_pid, health, text_and_usage, until
from server_processes import controllers
from serving_process import Running, running

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.metering import Store, Usage, UsageFilter, UsageRow

STREAM = {
    "model": "assistant",
    "max_tokens": 200,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
STREAMS = 6
MODULE = "serving.transport.engine_process.main"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path_factory.mktemp('store') / 'ledger.db'}")
    yield store
    store.close()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return a model whose engine takes 10 ms a step and longer to load than a failover may take."""
    return write_instant_model(tmp_path_factory.mktemp("backed"), step_delay=0.01, load_delay=0.5)


@pytest.fixture(scope="module")
def backed(store: Store, bundle: Bundle) -> Iterator[Running]:
    """Yield a server of two workers and a database; its engine has a standby and records what it generates."""
    root = Path(bundle.model_dir).parent
    settings: dict[str, Any] = {"workers": 2, "database": f"sqlite:///{store.engine.url.database}"}
    engine = EngineSettings(idle_timeout=0.3, standby=1)
    with (
        importable(),
        running(bundle, core=CORE, engine=engine, state_dir=str(root / "state"), **settings) as server,
    ):
        yield server


def stream(server: Running, serial: int) -> tuple[str, dict[str, int]]:
    """Return text and usage of a whole stream, which depend on ``serial`` alone."""
    prompt = {"messages": [{"role": "user", "content": f"#{serial}"}], "seed": serial}
    with asking(server, STREAM | prompt) as answer:
        assert answer.status == 200
        return text_and_usage(answer.read())


def state(server: Running) -> dict[str, Any]:
    """Return the engine's health, {} while a worker looks for it."""
    try:
        return health(server)
    except urllib.error.HTTPError as error:
        error.close()
        return {}


def standby_pid(server: Running) -> int:
    """Return the process id of the standby engine once it is ready."""
    until(lambda: state(server).get("standbys") == 1 and len(engines(server)) == 2)
    (found,) = engines(server) - {engine_pid(server)}
    return found


def engines(server: Running) -> set[int]:
    """Return the pids of all living engine processes of this server, the standby's included."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or ()
        if any(word.startswith(str(server.runtime)) for word in words) and any(MODULE in word for word in words):
            found |= {process.pid} if not gone(process) else set()
    return found


def under_way(server: Running, streams: int) -> None:
    """Wait until so many requests run in the engine and tokens of all have come."""
    until(lambda: state(server).get("running") == streams)
    steps = state(server)["steps"]
    until(lambda: state(server)["steps"] > steps + 2)


def is_settled(row: UsageRow) -> bool:
    return row.status != "open" and row.generated_tokens >= row.completion_tokens


def settled(store: Store, count: int) -> list[UsageRow]:
    """Return all rows, once so many exist, none is open and the engines' counts have arrived."""
    rows = lambda: list(Usage(store).rows(UsageFilter()))  # noqa: E731
    until(lambda: len(rows()) >= count and all(is_settled(row) for row in rows()))
    return rows()


def test_streams_outlive_their_engine(backed: Running, bundle: Bundle, store: Store) -> None:
    """After kill -9 of the engine, also with the controller process or the standby, streams are as undisturbed, the
    standby serves if it is left, and ledger and metrics agree.
    """
    killed, usages = set(), []
    with ThreadPoolExecutor(STREAMS) as pool:
        expected = list(pool.map(lambda n: stream(backed, n), range(STREAMS)))
        usages += [usage for _, usage in expected]
        for and_also in (None, "controller", "standby"):
            standby = standby_pid(backed)
            streams = [pool.submit(stream, backed, n) for n in range(STREAMS)]
            under_way(backed, STREAMS)
            victims = [engine_pid(backed)]
            if and_also is not None:
                victims.append(standby if and_also == "standby" else controllers(backed)[0].pid)
            for victim in reversed(victims):
                os.kill(victim, signal.SIGKILL)
            killed |= set(victims)
            assert [one.result() for one in streams] == expected, and_also
            assert stream(backed, 0) == expected[0]
            assert (engine_pid(backed) == standby) == (and_also != "standby")
            usages += [usage for _, usage in [*expected, expected[0]]]
    rows = settled(store, len(usages))
    assert {row.status for row in rows} == {"ok"}
    counts = [(row.prompt_tokens, row.completion_tokens) for row in rows]
    assert sorted(counts) == sorted((one["prompt_tokens"], one["completion_tokens"]) for one in usages)
    truth = Truth(bundle.model_dir, killed)
    for row in rows:
        certain, doubtful = truth.certain[row.request_id], truth.doubtful[row.request_id]
        assert certain <= row.generated_tokens <= certain + doubtful, row
    certain, total = truth.certain.total(), pick(figures(backed), "mlflow_llm_generated_tokens_total")
    assert certain <= total <= certain + truth.doubtful.total()
