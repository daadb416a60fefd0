"""The `mlflow-llm` commands that people copy from the documents are commands that there are."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from mlflow_llm.serving.cli import cli

ROOT = Path(__file__).parents[3]
COMMAND = re.compile(r"\bmlflow-llm ((?:[a-z][a-z-]*)(?: [^`#|;&)\n]*)?)")


def documented() -> list[str]:
    """Return the commands in README and documents as lists of words, with continued lines joined."""
    texts = [
        path.read_text().replace("\\\n", " ") for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    ]
    return sorted({" ".join(found.split()) for text in texts for found in COMMAND.findall(text)})


def unknown(line: str) -> list[str]:
    """Return the options of ``line`` that its command does not have, or the line itself if there is no such command."""
    command: click.Command = cli
    words = re.sub(r'"[^"]*"', '""', line).split()  # a quoted command of another program has options of its own
    options = {"-h", "--help", "--version"}
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
        options |= {name for one in command.params for name in one.opts}
    return [word for word in words if re.fullmatch(r"--?[a-zA-Z][a-z-]*", word) and word not in options]


def test_documents_contain_commands() -> None:
    """The documents contain commands, so that the test below checks something."""
    assert len(documented()) > 40


@pytest.mark.parametrize("line", documented())
def test_every_option_exists(line: str) -> None:
    """Each option of a command in the documents is one of that command's."""
    assert unknown(line) == []
