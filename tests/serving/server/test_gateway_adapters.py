"""Adapters of several gateways over one PostgreSQL database: added on one host, they are the same on all of them.

The instant engine's replies depend on the name by which the engine knows an adapter, and so on its content.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from instant_model import write_instant_model
from postgres_databases import new_database
from processes import gone
from server_calls import BODY, asking, engine_pid, engine_pids, until
from server_processes import controllers
from serving_process import Running, running

from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.metering import Store, Usage, UsageFilter
from mlflow_llm.serving.model_files.adapter_contents import CONFIG, WEIGHTS, content_of

ENGINE = EngineSettings(idle_timeout=0.3)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADDED = "Success: LoRA adapter 'legal' added successfully."
Start = Callable[[str], Running]


@pytest.fixture
def database(postgres_server: str) -> str:
    return new_database(postgres_server)


@pytest.fixture
def start(tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts a gateway on a host of its own: other state, cache and adapters."""
    bundle = write_instant_model(tmp_path)
    with ExitStack() as servers:

        def call(host: str) -> Running:
            monkeypatch.setenv("MLFLOW_LLM_CACHE", str(tmp_path / host / "cache"))
            # a short path: Unix sockets' names are limited
            runtime = servers.enter_context(tempfile.TemporaryDirectory(prefix="mll-"))
            options: dict[str, Any] = {"state_dir": str(tmp_path / host / "state"), "runtime_dir": runtime}
            options["adapter_sources"] = str(tmp_path / host / "adapters")
            server = servers.enter_context(running(bundle, engine=ENGINE, database=database, **options))
            server.runtime = Path(runtime)
            return server

        yield call


def adapter(place: Path, weights: bytes) -> str:
    """Write an adapter's files and return the hash of their content."""
    place.mkdir(parents=True, exist_ok=True)
    (place / CONFIG).write_text("{}")
    (place / WEIGHTS).write_bytes(weights)
    return content_of(place).content_hash


def post(server: Running, path: str, **body: Any) -> tuple[int, str]:
    with asking(server, body, path) as answer:
        return answer.status, answer.read().decode()


def answer_of(server: Running) -> tuple[int, str, str]:
    """Return status, text and id of a request for the adapter."""
    with asking(server, BODY | {"model": "assistant:legal"}) as answer:
        reply = json.loads(answer.read())
    if answer.status != 200:
        return answer.status, reply["error"]["message"], ""
    return answer.status, reply["choices"][0]["message"]["content"], reply["id"]


def states(server: Running) -> list[list[dict[str, str]]]:
    """Return what the gateways say of their adapters."""
    with urllib.request.urlopen(f"{server.url}/api/2.0/serving-endpoints/assistant", timeout=240) as answer:
        return [one.get("adapters", []) for one in json.load(answer)["gateways"]]


def hashes(database: str) -> dict[str, str | None]:
    """Return the adapter's hash in each row of the ledger, by the id of the reply."""
    with closing(Store(database)) as store:
        rows = Usage(store).rows(UsageFilter())
        return {f"chatcmpl-{row.request_id}": row.adapter_hash for row in rows if row.adapter == "legal"}


def kill(server: Running) -> None:
    """Kill all processes of a server with SIGKILL, its engines included."""
    family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    for process in family:
        process.kill()
    psutil.wait_procs(family, 30)
    server.process.wait(240)


def test_an_adapter_that_one_host_has_is_on_all(start: Start, database: str, tmp_path: Path) -> None:
    """An adapter added on one host answers on every gateway with the same weights: also when its directory is gone,
    after an engine was killed, and from the first request on in a gateway that starts later. Rows have the hash.
    """
    first, second = start("first"), start("second")
    place = tmp_path / "first" / "adapters" / "legal"
    content_hash = adapter(place, b"weights")
    assert post(first, LOAD, lora_name="legal", lora_path=str(place)) == (200, ADDED)
    assert states(second) == [[{"name": "legal", "state": "LOADED", "content_hash": content_hash}]] * 2
    (text,) = {answer_of(one)[1] for one in (first, second)}
    shutil.rmtree(place)
    pid = engine_pid(first)
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid) and engine_pids(first) - {pid} != set())
    third = start("third")
    assert [answer_of(one)[:2] for one in (third, first, second)] == [(200, text)] * 3
    until(lambda: list(hashes(database).values()) == [content_hash] * 5)
    caches = [tmp_path / host / "cache" / "downloads" / f"adapter-{content_hash}" for host in ("first", "second")]
    assert [(cache / WEIGHTS).read_bytes() for cache in caches] == [b"weights"] * 2
    assert post(second, UNLOAD, lora_name="legal")[0] == 200
    assert answer_of(second)[0] == 404
    until(lambda: [answer_of(one)[0] for one in (first, third)] == [404, 404])


def test_replaced_weights_are_the_only_ones_after_the_call(start: Start, database: str, tmp_path: Path) -> None:
    """While an adapter is replaced under load, every request is answered, by the content that its row names; once the
    call has returned, no gateway uses the old one.
    """
    servers = (start("first"), start("second"))
    place = tmp_path / "first" / "adapters" / "legal"
    old = adapter(place, b"old")
    assert post(servers[0], LOAD, lora_name="legal", lora_path=str(place)) == (200, ADDED)
    before = {answer_of(one)[1] for one in servers}
    over, answers = threading.Event(), list[tuple[int, str, str]]()

    def ask(server: Running) -> None:
        while not over.is_set():
            answers.append(answer_of(server))

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, server) for server in (*servers, *servers)]
        until(lambda: len(answers) > 8)
        new = adapter(place, b"new")
        call = {"lora_name": "legal", "lora_path": str(place), "load_inplace": True}
        replaced = post(servers[0], LOAD, **call)
        after = {answer_of(one)[1] for one in (*servers, *servers)}
        over.set()
        for one in asked:
            one.result(240)
    assert replaced == (200, ADDED)
    assert {status for status, _, _ in answers} == {200}
    assert len(before) == len(after) == 1
    assert before != after
    texts = {old: before.pop(), new: after.pop()}
    until(lambda: all(reply_id in hashes(database) for _, _, reply_id in answers))
    used = hashes(database)
    assert [text for _, text, _ in answers] == [texts[str(used[reply_id])] for _, _, reply_id in answers]


def test_of_concurrent_adds_one_content_stays(start: Start, tmp_path: Path) -> None:
    """When two gateways load two contents under one name at once, all gateways end with the same one; a call that was
    overtaken says so.
    """
    servers = (start("first"), start("second"))
    places = [tmp_path / host / "adapters" / "legal" for host in ("first", "second")]
    for place in places:
        adapter(place, place.parent.parent.name.encode())
    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            calls = [
                pool.submit(post, server, LOAD, lora_name="legal", lora_path=str(place), load_inplace=True)
                for server, place in zip(servers, places, strict=True)
            ]
            outcomes = [call.result(240) for call in calls]
        assert (200, ADDED) in outcomes
        assert {status for status, _ in outcomes} <= {200, 409}
        assert len({answer_of(one)[1] for one in servers}) == 1
        ((one, other),) = [[each[0]["content_hash"] for each in states(servers[0])]]
        assert one == other
    refused = post(servers[1], LOAD, lora_name="legal", lora_path=str(places[1]))
    assert (refused[0], "already been loaded" in refused[1]) == (400, True)


def test_a_gateway_killed_while_it_adds_leaves_the_adapter_to_others(start: Start, tmp_path: Path) -> None:
    """When the adding gateway is killed before all have the adapter, the others get it without that host."""
    first, second = start("first"), start("second")
    place = tmp_path / "first" / "adapters" / "legal"
    content_hash = adapter(place, b"weights")
    (controller,) = controllers(second)
    controller.suspend()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(post, first, LOAD, lora_name="legal", lora_path=str(place))
        until(lambda: any(each and each[0]["state"] == "LOADED" for each in states(second)))
        kill(first)
        call.exception(240)
    shutil.rmtree(place)
    controller.resume()
    until(lambda: answer_of(second)[0] == 200)
    until(lambda: states(second) == [[{"name": "legal", "state": "LOADED", "content_hash": content_hash}]])
