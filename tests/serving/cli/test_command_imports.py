"""The modules that each command imports before it does anything, and its help text."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from mlflow_llm.serving.cli import cli

HEAVY = ("torch", "transformers", "tokenizers", "mlflow", "numpy", "pandas")
SQL = ("sqlalchemy", "alembic")
CODE = f"""
import sys
import mlflow_llm.serving.cli.serve.command, mlflow_llm.serving.http.gunicorn.server
print(*(name for name in {HEAVY + SQL!r} if name in sys.modules))
import mlflow_llm.serving.http.gunicorn.worker, mlflow_llm.serving.control.main
print(*(name for name in {HEAVY + SQL!r} if name in sys.modules))
"""


def test_commands_and_arbiter_import_no_heavy_library() -> None:
    """The command line, the process that starts a server's workers, and the controller have neither torch nor MLflow in
    memory; a command has SQL where it asks a store, and only who makes or migrates one has alembic."""
    asked = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert asked.stdout.splitlines() == ["", "sqlalchemy"]


@pytest.mark.parametrize("name", ["", "keys", "limits", "prices", "usage", "endpoints", "logs"])
def test_lists_of_commands_are_whole(name: str) -> None:
    """The list of commands describes each one in one line of an 80-column terminal, without an ellipsis."""
    shown = CliRunner().invoke(cli, [*name.split(), "--help"], terminal_width=80).output
    lines = shown.partition("Commands:\n")[2].splitlines()
    assert [line for line in lines if line.endswith("...")] == []
    assert len(lines) >= 2
