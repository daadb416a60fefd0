"""``/show`` on a server with prices: what a conversation cost."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner
from instant_model import write_instant_model
from serving_process import running

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.metering import Price, Prices, Store


def test_a_conversation_has_its_cost(tmp_path: Path) -> None:
    """The cost of a conversation has that of every reply, also one that was replaced, and of no other conversation."""
    url = f"sqlite:///{tmp_path}/serving.db"
    store = Store(url, make=True)
    Prices(store).set("*", Price(output=1_000_000_000))
    store.close()
    words = ["chat", "--no-log", "--temperature", "0", "--max-tokens", "3"]
    with running(write_instant_model(tmp_path / "m"), database=url, state_dir=str(tmp_path / "state")) as server:
        runner = CliRunner(env={"MLFLOW_LLM_URL": server.url, "MLFLOW_LLM_KEY": None})
        assert runner.invoke(cli, [*words, "Other"]).exit_code == 0
        done = runner.invoke(cli, words, input="Hello\n/retry\n/show\n")
    found = re.search(r"^cost +(.*)$", done.stderr, re.M)
    assert found is not None, done.output
    assert found[1] == "0.006"
