"""Two servers of one user, which share engines and the state directory: staging beside production, or of one store."""

from __future__ import annotations

import http.client
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy as sa
from instant_model import write_instant_model
from server_calls import BODY, asking, until
from serving_process import Running, running

from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.metering import Store, Usage, UsageFilter
from mlflow_llm.serving.metering.store.tables import owners
from mlflow_llm.serving.metering.usage.usage import UsageRow

ENGINE = EngineSettings(idle_timeout=0.3)
STREAM: dict[str, Any] = BODY | {"stream": True, "ignore_eos": True, "max_tokens": 4000}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Running]]:
    """Return a function that starts a server over a database; the runtime directory is kept for later servers."""
    bundle = write_instant_model(tmp_path, step_delay=0.005)
    runtime = tempfile.mkdtemp(prefix="mll-")  # a short path: Unix sockets' names are limited
    with ExitStack() as servers:

        def call(url: str) -> Running:
            options: dict[str, Any] = {"database": url, "state_dir": str(tmp_path / "state"), "runtime_dir": runtime}
            return servers.enter_context(running(bundle, engine=ENGINE, **options))

        yield call
    shutil.rmtree(runtime, ignore_errors=True)


@pytest.fixture
def production_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/production.db"


@pytest.fixture
def staging_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/staging.db"


def rows(store: Store) -> list[UsageRow]:
    return list(Usage(store).rows(UsageFilter()))


def heartbeats(store: Store) -> set[int]:
    return set(store.read(lambda connection: connection.execute(sa.select(owners.c.heartbeat_ms)).scalars().all()))


def whole(server: Running, tokens: int) -> None:
    with asking(server, BODY | {"ignore_eos": True, "max_tokens": tokens}) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == tokens


def received(answer: http.client.HTTPResponse) -> int:
    """Return the number of pieces of text until the stream ends, in whatever way."""
    count = 0
    try:
        while line := answer.readline():
            count += b'"content":' in line
    except (OSError, http.client.HTTPException):
        pass
    return count


def kill(server: Running) -> None:
    """Kill all processes of a server with SIGKILL, except the engine, which staging uses too."""
    family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    for process in family:
        process.kill()
    psutil.wait_procs(family, 30)
    server.process.wait(240)


def test_a_server_killed_beside_another_of_another_store(
    start: Callable[[str], Running], production_url: str, staging_url: str
) -> None:
    """The requests of a killed server are settled by its own next start, not by another store's server, and billed to
    the token in its own store.
    """
    production, staging = start(production_url), start(staging_url)
    own, other = Store(production_url), Store(staging_url)
    for tokens in (7, 11):
        whole(production, tokens)
        whole(staging, tokens + 1)
    with asking(production, STREAM) as answer:
        for _ in range(40):
            answer.readline()
        kill(production)
        got = 15 + received(answer)
    before = heartbeats(other)
    until(lambda: not heartbeats(other) & before)  # every worker of staging has been through its upkeep
    before = heartbeats(other)
    until(lambda: not heartbeats(other) & before)
    assert sorted(row.status for row in rows(own)) == ["ok", "ok", "open"]
    whole(staging, 5)
    again = start(production_url)
    until(lambda: all(row.status != "open" and row.generated_tokens >= row.completion_tokens for row in rows(own)))
    whole(again, 3)
    until(lambda: len(rows(own)) == 4 and all(row.status != "open" and row.generated_tokens for row in rows(own)))
    found = sorted(rows(own), key=lambda row: row.started_ms)
    assert [row.status for row in found] == ["ok", "ok", "recovered", "ok"]
    assert [row.completion_tokens for row in found if row.status == "ok"] == [7, 11, 3]
    assert got <= found[2].completion_tokens <= found[2].generated_tokens
    assert found[2].prompt_tokens == found[0].prompt_tokens
    until(lambda: len(rows(other)) == 3 and all(row.generated_tokens for row in rows(other)))
    assert sorted(row.completion_tokens for row in rows(other)) == [5, 8, 12]
    assert {row.status for row in rows(other)} == {"ok"}
    own.close()
    other.close()


def test_a_server_killed_beside_another_of_its_store(start: Callable[[str], Running], production_url: str) -> None:
    """If one of two servers of a database is killed, the other settles its requests, exactly and once."""
    first, second, store = start(production_url), start(production_url), Store(production_url)
    whole(first, 7)
    whole(second, 9)
    with asking(first, STREAM) as answer:
        for _ in range(40):
            answer.readline()
        kill(first)
        got = 15 + received(answer)
    until(lambda: all(row.status != "open" and row.generated_tokens >= row.completion_tokens for row in rows(store)))
    finished, also, cut = sorted(rows(store), key=lambda row: row.completion_tokens)
    assert [(row.status, row.completion_tokens) for row in (finished, also)] == [("ok", 7), ("ok", 9)]
    assert cut.status == "recovered"
    assert got <= cut.completion_tokens <= cut.generated_tokens
    store.close()
