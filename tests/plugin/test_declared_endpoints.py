"""Endpoints that ``mlflow-llm serve MODEL`` declares, changed as any others are."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from command_processes import await_line, llm_command
from mlflow import MlflowClient
from stores import own_registry

from mlflow_llm.flavors import llm
from mlflow_llm.plugin.processes import free_port
from mlflow_llm.serving.cli import cli

GUARDRAILS = '{"input": {"invalid_keywords": ["forbidden"]}}'


class Server:
    """A server that a command line has started, the commands that know its URL, and its database."""

    def __init__(self, url: str, database: Path) -> None:
        self.url, self.database = url, database
        self._runner = CliRunner(env={"MLFLOW_LLM_URL": url, "MLFLOW_LLM_KEY": None})

    def run(self, *words: str) -> Result:
        done = self._runner.invoke(cli, list(words))
        assert done.exit_code == 0, done.output
        return done

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json").stdout)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def chat(self, model: str, text: str = "Hi") -> tuple[str, int]:
        """Return which entity has answered, and the number of tokens."""
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=240) as answer:
            return answer.headers["served-model-name"], json.load(answer)["usage"]["total_tokens"]

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self.database)) as connection:
            return connection.execute(query).fetchall()


@contextlib.contextmanager
def serving(place: Path, name: str, *models: str) -> Iterator[Server]:
    port, database = free_port(), place / "serving.db"
    words = [*models, "--database", f"sqlite:///{database}", "--port", str(port), "--workers", "1"]
    with llm_command(place, name, "serve", *words) as log:
        await_line(log, "listening on")
        yield Server(f"http://127.0.0.1:{port}", database)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_what_a_command_line_declares_can_be_changed(
    place: Path, saved_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registered alias and a directory get guardrails, a shadow and a followed alias, which a restart keeps; requests
    that name what was asked for, and prices that are set by it, go on."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tiny chat"
    folder.symlink_to(saved_model)
    champion = "models:/talker@champion"
    with own_registry(tmp_path):
        for _ in range(2):
            llm.log_model(saved_model.parent / "hf", name="m", registered_model_name="talker")
        MlflowClient().set_registered_model_alias("talker", "champion", "1")
        with serving(place, "first", champion, f"{folder}=small") as server:
            listed = server.run("endpoints").stdout
            assert "talker-champion" in listed
            assert "tiny-chat" in listed
            assert "/" not in listed.replace("tokens/s", "").replace("TOKENS/S", ""), listed
            server.run("prices", "set", champion, "--input", "2", "--database", f"sqlite:///{server.database}")
            assert server.chat("talker")[0] == "talker-champion"
            assert server.chat(champion)[0] == "talker-champion"
            assert server.chat("small")[0] == "tiny-chat"
            assert [row[0] > 0 for row in server.rows("SELECT cost FROM ledger ORDER BY started_ms")] == [
                True,
                True,
                False,
            ]

            for name in ("talker", "small"):
                changed = server.json("endpoints", "update", name, "--guardrails", GUARDRAILS)
                assert changed["config"]["guardrails"]["input"]["invalid_keywords"] == ["forbidden"]
            with pytest.raises(urllib.error.HTTPError, match="400"):
                server.chat("small", "a forbidden word")
            shadowed = server.json("endpoints", "update", "small", "--shadow", "talker/2=candidate")
            assert [one["name"] for one in shadowed["config"]["served_entities"]] == ["tiny-chat", "candidate"]
            followed = server.json("endpoints", "update", "talker", "--follow-alias")
            (entity,) = followed["config"]["served_entities"]
            found = (entity["name"], entity["entity_name"], entity["entity_version"], entity["follow_alias"])
            assert found == ("talker-champion", "talker", "champion", True)
            server.chat("talker")
            assert server.rows("SELECT cost > 0 FROM ledger ORDER BY started_ms DESC LIMIT 1") == [(1,)]
        with serving(place, "second", champion, f"{folder}=small") as server:
            for name, versions in (("talker", 3), ("small", 3)):
                kept = server.get(f"/api/2.0/serving-endpoints/{name}")
                assert (kept["config"]["config_version"], kept["config_origin"]) == (versions, "api")
                given = server.json("endpoints", "give-back", name)
                assert "guardrails" not in given["config"]
