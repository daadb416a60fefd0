"""``mlflow-llm ps`` and ``stop`` on a real server and its engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result
from instant_model import write_instant_model
from serving_process import Running, running

from mlflow_llm.serving.cli import cli


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(write_instant_model(tmp_path_factory.mktemp("ps")), name="ps-assistant") as found:
        yield found


def command(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


def listed() -> dict[str, Any]:
    done = command("ps", "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def engine_of(server: Running) -> dict[str, Any]:
    (found,) = [one for one in listed()["engines"] if Path(one["place"]).is_relative_to(server.runtime)]
    return found


def test_ps_lists_a_server_and_its_engine(server: Running) -> None:
    """A server is listed with its address and endpoints, its engine with the endpoint, both with pid and memory."""
    (found,) = [one for one in listed()["servers"] if one["pid"] == server.process.pid]
    assert found["addresses"] == [server.url]
    assert found["endpoints"] == {"ps-assistant": "model-1"}
    assert found["memory"] > 0
    engine = engine_of(server)
    assert (engine["state"], engine["model"]) == ("ready", "ps-assistant")
    assert engine["clients"] >= 1
    assert psutil.pid_exists(engine["pid"])
    lines = command("ps").stdout
    assert server.url in lines
    assert "ps-assistant (model-1)" in lines


def test_an_engine_of_a_server_is_not_stopped_alone(server: Running) -> None:
    """The engine of a server would be started again, so the server is named instead."""
    refused = command("stop", str(engine_of(server)["pid"]))
    assert refused.exit_code == 1
    assert f"the server {server.process.pid} keeps this engine running" in refused.stderr


def test_stop_of_nothing() -> None:
    """A name that nothing has is an error that says where the names are."""
    refused = command("stop", "nobody-has-this")
    assert refused.exit_code == 1
    assert "no server or engine nobody-has-this runs; `mlflow-llm ps` lists them" in refused.stderr


def test_stop_ends_a_server(tmp_path: Path) -> None:
    """``stop`` takes an endpoint's name and returns when the server has ended; it is then no longer listed."""
    with running(write_instant_model(tmp_path), name="ps-ended") as server:
        done = command("stop", "ps-ended")
        assert done.exit_code == 0, done.output
        assert done.stdout == f"stopped the server {server.process.pid}\n"
        assert server.process.wait(60) == 0
    assert server.process.pid not in [one["pid"] for one in listed()["servers"]]
