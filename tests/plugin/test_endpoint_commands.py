"""``mlflow-llm endpoints`` and ``top`` against a server whose endpoints are created and changed by them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner, Result
from command_processes import await_line, llm_command

from mlflow_llm.plugin.processes import free_port
from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.cli.endpoints.config_options import changed, entity_of


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


def test_an_endpoint_is_managed_from_the_terminal(command: Commands, saved_model: Path, tmp_path: Path) -> None:
    """An endpoint is created, shown, watched and deleted, and a wrong update is refused (the way between the two is in
    the recorded sessions of docs/how-to/terminal.md)."""
    first = f"{saved_model}=first"
    made = command("endpoints", "create", "talk", "-m", first, "-C", "max_model_len=128", "--tag", "team=a")
    assert (made.exit_code, made.stdout) == (0, f"talk serves version 1: {saved_model}\n"), made.output

    (tmp_path / "no-model").mkdir()
    failed = command("endpoints", "update", "talk", "-m", f"{tmp_path / 'no-model'}=bad")
    assert (failed.exit_code, failed.stderr.startswith("Error: ")) == (1, True)

    listed = command("endpoints")
    assert re.search(r"^talk +chat +first +", listed.stdout, re.M)
    (endpoint,) = json.loads(command("endpoints", "--json").stdout)
    assert (endpoint["replicas"], endpoint["tokens_per_second"], endpoint["config_version"]) == (1, 0.0, 1)

    logged = command("endpoints", "update", "talk", "--payload-log", '{"max_rows": 5}', "--json")
    assert json.loads(logged.stdout)["config"]["payload_log"]["max_rows"] == 5
    assert command("chat", "--no-log", "--model", "talk", "--max-tokens", "3", "Hi").exit_code == 0
    while not json.loads(command("endpoints", "payloads", "talk", "--json").stdout):
        time.sleep(0.1)  # the log is written behind the request's back
    assert re.search(r"^20\S+ \S+ +200 .* Hi +\S", command("endpoints", "payloads", "talk").stdout, re.M)
    file = tmp_path / "payloads.parquet"
    assert command("endpoints", "payloads", "talk", "--parquet", str(file)).exit_code == 0
    assert pd.read_parquet(file)["status_code"].tolist() == [200]
    assert command("endpoints", "payloads", "talk", "--delete", input="n\n").exit_code == 1
    assert "deleted the texts of 1 requests" in command("endpoints", "payloads", "talk", "--delete", "-y").stderr
    off = command("endpoints", "update", "talk", "--payload-log", "off", "--json")
    assert "payload_log" not in json.loads(off.stdout)["config"]
    found = json.loads(command("top", "--json").stdout)
    (engine,) = found["engines"]
    assert (engine["endpoint"], engine["entity"], engine["state"]) == ("talk", "first", "ready")
    assert engine["completion_tokens_by_adapter"][""] >= 1
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
        (("--url", "http://127.0.0.1:8", "delete", "a"), "--url goes behind the command: mlflow-llm endpoints delete"),
        (("--json", "history", "a"), "--json goes behind the command"),
        (("rollback", "a", "0"), "0 is not in the range"),
        (("update", "a", "--payload-log", "yes"), "expected on, off, or a JSON object of its settings"),
        (("payloads", "a", "--delete", "--parquet", "x"), "--delete or --parquet, not both"),
    ],
)
def test_mistakes_are_told_before_a_server_is_asked(words: tuple[str, ...], told: str) -> None:
    """A config that cannot be meant is a usage error that says what is."""
    done = Commands("http://127.0.0.1:9")("endpoints", *words)
    assert (done.exit_code, told in done.stderr) == (2, True), done.stderr


ENTITY = {"name": "first", "entity_name": "assistant", "entity_version": "1", "resolved_version": "1"}
SERVED = {
    "served_entities": [ENTITY | {"engine_settings": {"max_model_len": 128}, "defaults": {"top_p": 0.9}}],
    "served_models": [],
    "traffic_config": {"routes": [{"served_model_name": "first", "traffic_percentage": 100}], "sticky": True},
    "config_version": 3,
    "prefix_sharing": "all",
}
NOTHING = {"models": [], "split": {}, "engine_settings": {}, "defaults": {}}


@pytest.mark.parametrize(
    ("changes", "entities", "traffic"),
    [
        (  # another model in the place of the only one: its settings stay
            {"models": [entity_of("assistant/2")], "defaults": {"max_tokens": 4}},
            [("assistant", "2", {"max_model_len": 128}, {"top_p": 0.9, "max_tokens": 4})],
            {"sticky": True},
        ),
        (  # a second model beside it: the settings stay with the name
            {"models": [entity_of("assistant/1=first"), entity_of("assistant@new")], "split": {"first": 90, "n": 10}},
            [("assistant", "1", {"max_model_len": 128}, {"top_p": 0.9}), ("assistant", "@new", None, None)],
            {"routes": [("first", 90), ("n", 10)], "sticky": True},
        ),
        (
            {"engine_settings": {"max_num_seqs": 2}, "sticky": False},
            [("assistant", "1", {"max_model_len": 128, "max_num_seqs": 2}, {"top_p": 0.9})],
            {"routes": [("first", 100)]},
        ),
    ],
)
def test_what_a_change_keeps(changes: dict[str, Any], entities: list[Any], traffic: dict[str, Any]) -> None:
    """A change keeps what it does not name: settings, traffic, prefix sharing; nothing only shown."""
    found = changed(SERVED, NOTHING | changes)
    names = ("entity_name", "entity_version", "engine_settings", "defaults")
    assert [tuple(map(entity.get, names)) for entity in found["served_entities"]] == entities
    routes = [tuple(route.values()) for route in found["traffic_config"].get("routes", [])]
    assert found["traffic_config"] | ({"routes": routes} if routes else {}) == traffic
    assert set(found) == {"served_entities", "traffic_config", "prefix_sharing"}
