"""The documented `mlflow deployments` commands, checked by MLflow's own parser."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from mlflow.deployments.cli import commands

from mlflow_llm.plugin.deployments import target_help

ROOT = Path(__file__).parents[2]


def documented() -> list[str]:
    """Return the command lines of the documents and of the target's help, with optional parts included."""
    texts = [(ROOT / name).read_text() for name in ("README.md", "docs/deployments.md")] + [target_help()]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [line.replace("[", "").replace("]", "") for line in lines if line.startswith("mlflow deployments ")]


def test_commands_are_found_in_the_documents() -> None:
    """The documents name create, update and delete, and the help names create."""
    assert {re.split(r"\s+", line)[2] for line in documented()} == {"create", "update", "delete"}
    assert len(documented()) >= 5


@pytest.mark.parametrize("line", documented())
def test_every_option_exists(line: str) -> None:
    """MLflow's own parser accepts every documented line."""
    _, _, name, *words = shlex.split(line, comments=True)
    command = commands.commands[name]
    parsed = command.make_context(name, words)
    assert parsed.params["target"].startswith("llm")
    assert parsed.params["name"]
