"""A conversation in a terminal with a real model, whose engine is a child of the command."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pseudo_terminal import Terminal

from mlflow_llm.serving.cli.chat.log_database import LogDatabase


@pytest.fixture
def screen(smollm2_dir: Path, tmp_path: Path) -> Iterator[Terminal]:
    words = ["chat", "-m", str(smollm2_dir), "--temperature", "0"]
    opened = Terminal(words, {**os.environ, "TERM": "dumb", "MLFLOW_LLM_STATE": str(tmp_path / "state")})
    yield opened
    opened.close()


def test_a_conversation_with_real_weights(screen: Terminal, tmp_path: Path) -> None:
    """Ctrl-C at the keyboard stops one reply and not the engine; the conversation is answered, and recorded."""
    screen.read_until("> ", 240)
    screen.type("Count from one to five hundred, in words.\n")
    screen.read_until("\n")
    while not screen.shown:
        screen.poll()
    screen.type("\x03")
    screen.read_until("[stopped]\r\n> ")
    screen.type("/clear\n/set max_tokens 12\nWhat is the capital of France?\n")
    screen.read_until("Paris")
    screen.read_until("\n> ")
    screen.type("/bye\n")
    assert screen.wait(120) == 0
    database = LogDatabase(tmp_path / "state", make=False)
    stopped, answered = database.newest(None)
    database.close()
    assert (stopped.finish, stopped.completion_tokens) == ("stopped", None)
    assert "Paris" in answered.reply
    assert stopped.conversation != answered.conversation
