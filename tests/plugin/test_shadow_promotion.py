"""A version that answers copies of an endpoint's requests, and is promoted by what the payload log has of it."""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_processes import await_line, llm_command
from mlflow import MlflowClient
from stores import own_registry

from mlflow_llm.flavors import llm
from mlflow_llm.plugin.processes import free_port
from mlflow_llm.serving.cli import cli

ANSWERS, PATIENCE = 3, 240
SCORERS = """
def length(outputs):
    return len(outputs.encode())
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_shadow_is_promoted(place: Path, saved_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator adds version 2 as a shadow; requests are answered by version 1 alone; the log has both answers, and
    the alias moves to version 2, whose answers score higher. Other options of the endpoint keep the shadow."""
    (tmp_path / "shadow_scorers.py").write_text(SCORERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    port = free_port()
    runner = CliRunner(env={"MLFLOW_LLM_URL": f"http://127.0.0.1:{port}", "MLFLOW_LLM_KEY": None})
    with own_registry(tmp_path):
        for length in (3, 6):
            defaults = {"max_tokens": length, "ignore_eos": True, "logit_bias": {"64": 100.0}}
            llm.log_model(saved_model.parent / "hf", name="m", registered_model_name="talker", defaults=defaults)
        MlflowClient().set_registered_model_alias("talker", "champion", "1")
        words = ["--database", f"sqlite:///{place}/serving.db", "--port", str(port), "--workers", "1"]
        with llm_command(place, "serve", "serve", *words) as log:
            await_line(log, "listening on")
            made = runner.invoke(cli, ["endpoints", "create", "talk", "-m", "talker/1=one", "--shadow", "talker/2=two"])
            assert made.exit_code == 0, made.output
            assert made.stdout == "talk serves version 1: talker/1, talker/2 (shadow of 1)\n"
            kept = runner.invoke(cli, ["endpoints", "update", "talk", "--payload-log", "on", "--json"])
            entities = json.loads(kept.stdout)["config"]["served_entities"]
            assert [one.get("shadow", {}).get("sample") for one in entities] == [None, 1.0]
            for number in range(ANSWERS):
                asked = runner.invoke(cli, ["chat", "--no-log", "--model", "talk", f"Hi {number}"])
                assert (asked.exit_code, len(asked.stdout.strip())) == (0, 3), asked.output
            until = time.monotonic() + PATIENCE
            while len(json.loads(runner.invoke(cli, ["endpoints", "payloads", "talk", "--json"]).stdout)) < 2 * ANSWERS:
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.1)
            promote = ["promote", "models:/talker/2", "--alias", "champion", "--if-better", "--endpoint", "talk"]
            options = ["--scorer", "shadow_scorers:length", "--margin", "1", "--json"]
            few = runner.invoke(cli, [*promote, *options, "--min-requests", str(ANSWERS + 1)])
            assert few.exit_code == 1
            assert f"--min-requests: {ANSWERS} requests were answered by both versions" in few.stderr
            done = runner.invoke(cli, [*promote, *options, "--min-requests", str(ANSWERS)])
            assert done.exit_code == 0, done.output
            assert json.loads(done.stdout)["overall"]["difference"] == 3
            assert MlflowClient().get_model_version_by_alias("talker", "champion").version == 2
            back = ["promote", "models:/talker/1", "--alias", "champion", "--if-better", "--endpoint", "talk", *options]
            none = runner.invoke(cli, back)
            assert "no request that talker/2 answered and of which talker/1 got a copy" in none.stderr
            off = runner.invoke(cli, ["endpoints", "update", "talk", "--no-shadow"])
            assert off.stdout == "talk serves version 3: talker/1\n", off.output
    sys.modules.pop("shadow_scorers", None)
    gc.collect()  # SQLite connections of the store are closed when they are collected
