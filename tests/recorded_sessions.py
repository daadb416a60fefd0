"""Sessions in a terminal that a page of the documents shows: run again, and compared with what the page says.

A session is a block of the language ``console``. A line after ``$`` is a command. What follows is the terminal's
output, in which a line after ``>`` is typed at the prompt of ``chat``.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from pseudo_terminal import Terminal

PROMPT = "> "
VARIABLE = (  # what differs from run to run, and a word for it
    (re.compile(r"\b[0-9a-f]{20}\b"), "ID"),
    (re.compile(r"chatcmpl-\w+"), "REQUEST"),
    (re.compile(r"\b\d{4}-\d\d-\d\d( \d\d:\d\d(:\d\d)?)?"), "TIME"),
    (re.compile(r"\b[0-9a-f]{12}\b"), "HASH"),
    (re.compile(r"(?<=% of )\d+"), "N"),
    (re.compile(r"\b(torch +float32|native +\w+)\b"), "KERNELS"),
    (re.compile(r"\b\d+(\.\d+)?(?= (tokens/s|ms|s|MiB)\b)"), "N"),
)


def sessions(page: Path, title: str) -> list[tuple[str, str]]:
    """Return the commands of the sessions below a heading of the page, each with what it shows."""
    section = re.split(r"^## ", page.read_text(), flags=re.M)
    (text,) = [one for one in section if one.startswith(f"{title}\n")]
    found = []
    for block in re.findall(r"^```console\n(.*?)^```$", text, flags=re.M | re.S):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, shown = part.partition("\n")
            found.append((command, shown))
    return found


def run(command: str, shown: str, environment: Mapping[str, str], seconds: float = 240) -> str:
    """Return the terminal's output of a command, to which the lines after ``>`` in ``shown`` are typed."""
    name, *words = shlex.split(command)
    assert name == "mlflow-llm", command
    screen = Terminal(words, {**os.environ, "TERM": "dumb", "PYTHONPATH": os.pathsep.join(sys.path), **environment})
    try:
        output = ""
        typed = [line for line in shown.splitlines() if line.startswith(PROMPT)] if words[0] == "chat" else []
        for line in typed:
            output += _to_prompt(screen, seconds)
            screen.type(line.removeprefix(PROMPT) + "\n")
        screen.wait(seconds)
        return (output + screen.shown).replace("\r\n", "\n")
    finally:
        screen.close()


def _to_prompt(screen: Terminal, seconds: float) -> str:
    """Read up to the next prompt, which is alone on the last line."""
    read = screen.read_until(PROMPT, seconds)
    while read.rpartition("\n")[2] != PROMPT:  # one of a text, as /history shows it
        read += screen.read_until(PROMPT, seconds)
    return read


def normal(text: str) -> list[str]:
    """Return the lines of a session with a word in place of what differs from run to run, and single spaces."""
    for pattern, word in VARIABLE:
        text = pattern.sub(word, text)
    return [" ".join(line.split()) for line in text.strip().splitlines()]
