"""A server whose engines are kept by ``mlflow-llm engine``, as on other hosts: over TCP, with a key."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from engine_process import EngineProcess, engine_process
from gated_core import steps_up_to
from instant_model import write_instant_model
from remote_calls import LASTING, replicas, samples, streams
from server_calls import BODY, LONG, ask, asking, health, idle, text_and_usage, until, well, worker_of
from serving_process import Running, running

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.metering import Store
from mlflow_llm.serving.metering.store.tables import ledger
from mlflow_llm.serving.transport.auth import write_key


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("keys") / "key")
    write_key(path)
    return path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return a model whose engine takes 10 ms a step."""
    return write_instant_model(tmp_path_factory.mktemp("model"), step_delay=0.01)


@pytest.fixture(scope="module")
def two(bundle: Bundle, key: str) -> Iterator[tuple[Running, tuple[EngineProcess, EngineProcess]]]:
    """Yield a server over two engines, which tests end and restart."""
    with engine_process(bundle, key) as one, engine_process(bundle, key) as other:
        one.await_ready()
        other.await_ready()
        addresses = (one.address, other.address)
        with running(bundle, addresses=addresses, key_file=key) as server:
            until(lambda: replicas(server) == 2)
            yield server, (one, other)


Pair = tuple[Running, EngineProcess]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'serving.db'}"


@pytest.fixture(scope="module")
def one(bundle: Bundle, key: str, database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Yield a server over one engine, with a ledger."""
    state = str(tmp_path_factory.mktemp("state"))
    with (
        engine_process(bundle, key) as engine,
        running(bundle, addresses=(engine.address,), key_file=key, database=database, state_dir=state) as server,
    ):
        yield server, engine


@pytest.fixture(scope="module")
def hasty(bundle: Bundle, key: str) -> Iterator[Pair]:
    """Yield a server over one engine with a short drain and a short wait for a missing engine."""
    with (
        engine_process(bundle, key, "--drain-timeout", "0.5") as engine,
        running(bundle, addresses=(engine.address,), key_file=key, engine_timeout=1.0) as server,
    ):
        yield server, engine


@pytest.fixture(scope="module")
def expected(two: tuple[Running, object]) -> tuple[str, dict]:
    """Return text and usage of an undisturbed ``LASTING``."""
    with asking(two[0], LASTING) as answer:
        return text_and_usage(answer.read())


def test_answers_and_streams(two: tuple[Running, tuple[EngineProcess, ...]], expected: tuple[str, dict]) -> None:
    """Replies, streams, embeddings and an adapter work, and the metrics have both engines' work."""
    server = two[0]
    whole = json.loads(ask(server, BODY | {"max_tokens": LASTING["max_tokens"]})[1])
    assert whole["choices"][0]["message"]["content"] == expected[0]
    with asking(server, {"model": "assistant", "input": "a"}, "/v1/embeddings") as answer:
        assert len(json.load(answer)["data"][0]["embedding"]) == 16
    assert ask(server, BODY | {"model": "assistant:pirate"})[0] == 200
    assert streams(server, 4, lambda: None) == [expected] * 4
    until(lambda: samples(server)["mlflow_llm_generated_tokens_total"] >= 6 * LASTING["max_tokens"])
    found = samples(server)
    assert found["mlflow_llm_engine_ready"] == 1
    assert found["mlflow_llm_engine_steps_total"] >= 200


def test_a_killed_engine_moves_its_streams(
    two: tuple[Running, tuple[EngineProcess, ...]], expected: tuple[str, dict]
) -> None:
    """After kill -9 of one of two busy engines every stream is complete; its command restarts it and the server finds
    it.
    """
    server, (one, _) = two
    pid = one.pid()
    assert streams(server, 6, lambda: os.kill(pid, signal.SIGKILL)) == [expected] * 6
    until(lambda: replicas(server) == 2 and well(server))
    assert one.pid() != pid
    assert "restarting it" in one.log()


def test_an_engine_host_that_ends_moves_its_streams(
    two: tuple[Running, tuple[EngineProcess, ...]], expected: tuple[str, dict]
) -> None:
    """After SIGTERM of one of two engine commands its streams continue on the other, the server stays healthy, and the
    engine is used again when it returns.
    """
    server, (one, _) = two
    assert streams(server, 6, one.end) == [expected] * 6
    until(lambda: replicas(server) == 1)
    assert well(server)
    assert ask(server, BODY)[0] == 200
    one.start()
    until(lambda: replicas(server) == 2 and well(server))


def test_the_only_engine_comes_back(one: Pair, expected: tuple[str, dict]) -> None:
    """With one engine a kill is a pause; while it drains new requests are a 503 and running ones finish; while it is
    away requests wait for it.
    """
    server, engine = one
    pid = engine.pid()
    assert streams(server, 3, lambda: os.kill(pid, signal.SIGKILL)) == [expected] * 3
    until(lambda: idle(server))
    with ThreadPoolExecutor(1) as pool, asking(server, LASTING) as answer:
        first = answer.readline()
        with steps_up_to(server.model_dir, 0):  # keeps its drain going until the checks below
            ended = pool.submit(engine.end)
            until(lambda: not well(server))
            with asking(server, BODY) as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
        assert text_and_usage(first + answer.read()) == expected
        assert ended.result() == 0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, server, BODY)
        engine.start()
        assert waiting.result()[0] == 200


def test_the_host_of_a_killed_engine_has_its_counts(one: Pair, database: str) -> None:
    """The ledger has what an engine on another host had generated before kill -9, and what its successor did: rows have
    at least what was received, without any assumption, and the host keeps nothing that was read.
    """
    server, engine = one
    pid, tokens = engine.pid(), LASTING["max_tokens"]
    assert len(streams(server, 3, lambda: os.kill(pid, signal.SIGKILL))) == 3
    with contextlib.closing(Store(database)) as store:
        query = sa.select(ledger.c.completion_tokens, ledger.c.generated_tokens, ledger.c.assumed_tokens)
        last = query.where(ledger.c.task == "chat").order_by(ledger.c.started_ms.desc()).limit(3)

        def rows() -> list[sa.Row]:
            return store.read(lambda connection: list(connection.execute(last)))

        until(lambda: all(row.generated_tokens >= tokens for row in rows()))
        assert [(row.completion_tokens, row.assumed_tokens) for row in rows()] == [(tokens, 0)] * 3
        until(lambda: len(list(engine.state.glob("*/engines/*"))) == 1)  # that of the engine that runs


def test_a_killed_command_is_started_again(one: Pair, expected: tuple[str, dict]) -> None:
    """After kill -9 of ``mlflow-llm engine`` its engine goes on; the restarted command finds it, and ends it with
    itself.
    """
    server, engine = one
    pid, begun = engine.pid(), len(engine.log())
    assert streams(server, 3, engine.kill) == [expected] * 3
    assert ask(server, BODY)[0] == 200
    engine.start()
    until(lambda: "listening on" in engine.log()[begun:])
    assert engine.pid() == pid
    assert streams(server, 3, lambda: None) == [expected] * 3
    os.kill(pid, signal.SIGKILL)
    until(lambda: "restarting it" in engine.log()[begun:])
    assert ask(server, BODY)[0] == 200


def test_a_worker_that_never_met_the_engine(hasty: Pair) -> None:
    """A worker that starts while the only engine is away is unhealthy, a 503 after ``engine_timeout``, until it comes
    back.
    """
    server, engine = hasty
    with asking(server, LONG) as answer:
        answer.readline()
        worker = worker_of(server)
    assert worker is not None
    assert engine.end() == 0
    worker.kill()
    until(lambda: missed(server))
    with asking(server, BODY) as refused:
        assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
        assert "the engine is not running" in refused.read().decode()
    engine.start()
    until(lambda: well(server))
    assert ask(server, BODY)[0] == 200


def missed(server: Running) -> bool:
    """Return whether the answer says that the engine could not be reached yet."""
    try:
        health(server)
    except urllib.error.HTTPError as error:
        with error:
            return b"starting" in error.read()
    except OSError:
        pass
    return False


def test_a_drain_that_is_over_ends_streams(hasty: Pair) -> None:
    """At the end of a drain running streams get a final error event, and requests for the missing engine a 503 with
    Retry-After.
    """
    server, engine = hasty
    with asking(server, LONG | {"max_tokens": 4000}) as answer:
        answer.readline()
        assert engine.end() == 0
        lines = [line.removeprefix("data: ") for line in answer.read().decode().strip().split("\n\n")]
    assert json.loads(lines[-2])["error"]["code"] == "shutting_down"
    with asking(server, BODY) as late:
        assert (late.status, late.headers["Retry-After"]) == (503, "5")
    engine.start()
    until(lambda: well(server))


def refused(bundle: Bundle, address: str, key: str) -> str:
    """Return the output of a server that fails to start."""
    with pytest.raises(AssertionError) as raised, running(bundle, addresses=(address,), key_file=key):
        pass
    return str(raised.value)


def test_wrong_key_and_wrong_model(
    two: tuple[Running, tuple[EngineProcess, EngineProcess]], bundle: Bundle, key: str, tmp_path: Path
) -> None:
    """A server with another key, or another model, does not start, and says why."""
    other_key = str(tmp_path / "key")
    write_key(other_key)
    other_model = write_instant_model(tmp_path / "other")
    engine = two[1][1]
    assert "another key" in refused(bundle, engine.address, other_key)
    assert "the engine has another model: its content hash is" in refused(other_model, engine.address, key)


def test_a_port_that_is_taken(
    two: tuple[Running, tuple[EngineProcess, EngineProcess]], bundle: Bundle, key: str
) -> None:
    """A second engine on the same port ends with the reason."""
    engine = two[1][1]
    with engine_process(bundle, key, address=engine.address) as second:
        assert second.process is not None
        assert second.process.wait(240) == 1
        assert f"Error: {engine.address}: Address already in use" in second.log()
