"""``mlflow-llm endpoints`` and ``top`` against a server whose endpoints are created and changed by them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from command_processes import await_line, llm_command

from mlflow_llm.plugin.processes import free_port
from mlflow_llm.serving.cli import cli


class Commands:
    """The command line, with the URL of a server."""

    def __init__(self, url: str) -> None:
        self._runner = CliRunner(env={"MLFLOW_LLM_URL": url, "MLFLOW_LLM_KEY": None})

    def __call__(self, *words: str, input: str | None = None) -> Result:
        return self._runner.invoke(cli, list(words), input=input)


@pytest.fixture
def command(place: Path) -> Iterator[Commands]:
    """Return the commands of a server that has a store and no endpoint yet."""
    port = free_port()
    words = ["--database", f"sqlite:///{place}/serving.db", "--port", str(port), "--workers", "1"]
    with llm_command(place, "serve", "serve", *words) as log:
        await_line(log, "listening on")
        yield Commands(f"http://127.0.0.1:{port}")


def test_an_endpoint_is_managed_from_the_terminal(
    command: Commands, saved_model: Path, second_model: Path, tmp_path: Path
) -> None:
    """An endpoint is created, split, updated, rolled back and deleted, and each step is shown with its outcome."""
    first, second = f"{saved_model}=first", f"{second_model}=second"
    made = command("endpoints", "create", "talk", "-m", first, "-C", "max_model_len=128", "--tag", "team=a")
    assert (made.exit_code, made.stdout) == (0, f"talk serves version 1: {saved_model}\n"), made.output

    updated = command(
        "endpoints", "update", "talk", "-m", first, "-m", second, "--split", "first=90,second=10", "-D", "max_tokens=4"
    )
    assert updated.stdout == f"talk serves version 2: {saved_model} 90 %, {second_model} 10 %\n", updated.output
    turned = json.loads(command("endpoints", "split", "talk", "first=20", "second=80", "--json").stdout)
    entities = turned["config"]["served_entities"]
    assert [route["traffic_percentage"] for route in turned["config"]["traffic_config"]["routes"]] == [20, 80]
    assert [one.get("engine_settings") for one in entities] == [{"max_model_len": 128}, None]
    assert [one["defaults"] for one in entities] == [{"max_tokens": 4}] * 2

    (tmp_path / "no-model").mkdir()
    failed = command("endpoints", "update", "talk", "-m", f"{tmp_path / 'no-model'}=bad")
    assert failed.exit_code == 1
    assert failed.stderr.startswith("Error: ")
    back = command("endpoints", "rollback", "talk")
    assert back.stdout == f"talk serves version 4: {saved_model} 90 %, {second_model} 10 %\n", back.output

    head, *rows = command("endpoints", "history", "talk").stdout.splitlines()
    assert head.split() == ["VERSION", "STATE", "BY", "CREATED", "MODELS", "NOTE"]
    assert [row.split()[:2] for row in rows] == [
        ["4", "active"],
        ["3", "superseded"],
        ["2", "superseded"],
        ["1", "superseded"],
    ]
    assert rows[0].endswith("restores 2")

    listed = command("endpoints")
    assert "first 90 %, second 10 %" in listed.stdout
    (endpoint,) = json.loads(command("endpoints", "--json").stdout)
    assert (endpoint["replicas"], endpoint["tokens_per_second"], endpoint["config_version"]) == (2, 0.0, 4)

    assert command("chat", "--no-log", "--model", "talk", "--max-tokens", "3", "Hi").exit_code == 0
    found = json.loads(command("top", "--json").stdout)
    assert [(one["endpoint"], one["entity"]) for one in found["engines"]] == [("talk", "first"), ("talk", "second")]
    assert {one["state"] for one in found["engines"]} == {"ready"}
    assert sum(one["completion_tokens_by_adapter"].get("", 0) for one in found["engines"]) >= 1
    assert found["open_requests"] == {}
    table = command("top", "--once").stdout.splitlines()
    assert re.search(r"^talk +first +ready +1 +0 +0 +0 % of \d+ ", table[1])

    assert command("endpoints", "delete", "talk", input="n\n").exit_code == 1
    assert command("endpoints", "delete", "talk", "--yes").stderr == "deleted talk\n"
    assert "404: there is no endpoint 'talk'" in command("endpoints", "delete", "talk", "--yes").stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("create", "a"), "name a model with -m"),
        (("create", "a", "-m", "assistant"), "add a version or an alias, as in assistant/1 or assistant@champion"),
        (("create", "a", "-m", "x/1", "-m", "y/1"), "several models need a share each: --split"),
        (("create", "a", "-m", "x/1", "--split", "x-1=90"), "the shares sum to 90; expected 100"),
        (("split", "a", "x"), "'x': expected NAME=PERCENT"),
        (("split", "a", "x=50", "x=50"), "x has two shares"),
        (("create", "a", "-m", "x/1", "-C", "max_len=1"), "did you mean"),
        (("rollback", "a", "0"), "0 is not in the range"),
    ],
)
def test_mistakes_are_told_before_a_server_is_asked(words: tuple[str, ...], told: str) -> None:
    """A config that cannot be meant is a usage error that says what is."""
    done = Commands("http://127.0.0.1:9")("endpoints", *words)
    assert (done.exit_code, told in done.stderr) == (2, True), done.stderr
