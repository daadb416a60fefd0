"""The `mlflow deployments` commands that people copy are commands that MLflow takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from mlflow.deployments.cli import commands

from mlflow_llm.plugin.deployments import target_help

ROOT = Path(__file__).parents[2]


def documented() -> list[str]:
    """The command lines of the documents and of the target's help; what may be left out is given."""
    texts = [(ROOT / name).read_text() for name in ("README.md", "docs/deployments.md")] + [target_help()]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [line.replace("[", "").replace("]", "") for line in lines if line.startswith("mlflow deployments ")]


def test_there_are_some() -> None:
    """The documents name create, update and delete, the help create."""
    assert {re.split(r"\s+", line)[2] for line in documented()} == {"create", "update", "delete"}
    assert len(documented()) >= 5


@pytest.mark.parametrize("line", documented())
def test_every_option_exists(line: str) -> None:
    """MLflow's own parser takes the line; nothing is run."""
    _, _, name, *words = shlex.split(line, comments=True)
    command = commands.commands[name]
    parsed = command.make_context(name, words)
    assert parsed.params["target"].startswith("llm")
    assert parsed.params["name"]
