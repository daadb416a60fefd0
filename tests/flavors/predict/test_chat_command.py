"""``mlflow-llm chat -m``: the sampling values of a model's own come before those of the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mlflow_llm.flavors import llm
from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.cli.chat.log_database import LogDatabase, LoggedTurn


def chatted(model: Path, state: Path) -> tuple[LoggedTurn, str]:
    """Return the record of one message to the model, and standard error."""
    words = ["chat", "-m", str(model), "-C", "in_process=true", "--seed", "1", "a"]
    done = CliRunner(env={"MLFLOW_LLM_STATE": str(state)}).invoke(cli, words)
    assert done.exit_code == 0, done.output
    database = LogDatabase(state, make=False)
    (turn,) = database.newest(None)
    database.close()
    return turn, done.stderr


@pytest.mark.parametrize(
    ("own", "added"),
    [
        ({"temperature": 0.3, "max_tokens": 3, "ignore_eos": True}, {}),
        ({"top_p": 0.9, "max_tokens": 3, "ignore_eos": True}, {}),
        ({"max_tokens": 3, "ignore_eos": True}, {"temperature": 0.7}),
    ],
)
def test_a_models_own_values_hold(llama_dir: Any, tmp_path: Path, own: dict[str, Any], added: dict[str, Any]) -> None:
    """A model with sampling values of its own is asked with these, and is not told a temperature or a bound."""
    llm.save_model(tmp_path / "m", llama_dir, defaults=own)
    turn, told = chatted(tmp_path / "m", tmp_path / "state")
    assert (turn.defaults, turn.completion_tokens) == (added, 3)
    assert ("[temperature 0.7: " in told) == bool(added)
    assert turn.place == str(tmp_path / "m")
