"""``chat`` as a user starts it: through click's runner, and in a pseudo-terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from pseudo_terminal import OpenTerminal, Terminal
from serving_process import Running

from mlflow_llm.serving.cli import cli

Command = Callable[..., Result]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Return the state directory of the commands, which is not there yet."""
    return tmp_path / "state"


@pytest.fixture
def command(observed: Running, state: Path) -> Command:
    """Return ``command("chat", …, input=…)``, which runs a command against the server."""
    runner = CliRunner(env={"MLFLOW_LLM_URL": observed.url, "MLFLOW_LLM_KEY": None, "MLFLOW_LLM_STATE": str(state)})
    return lambda *args, input=None: runner.invoke(cli, list(args), input=input)


@pytest.fixture
def terminal(state: Path) -> Iterator[OpenTerminal]:
    """Return ``terminal("chat", …, term="dumb")``, which runs a command in a pseudo-terminal."""
    opened: list[Terminal] = []

    def run(*words: str, term: str = "dumb") -> Terminal:
        more = {"TERM": term, "PROMPT_TOOLKIT_NO_CPR": "1", "MLFLOW_LLM_STATE": str(state), "COLUMNS": "100"}
        opened.append(Terminal(list(words), {**os.environ, **more}))
        return opened[-1]

    yield run
    for one in opened:
        one.close()
