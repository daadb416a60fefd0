"""A conversation in a terminal: TAB, refusals, Ctrl-C, messages of several lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from pseudo_terminal import OpenTerminal
from serving_process import Running

PASTE_ON = "\x1b[?2004h"  # what prompt_toolkit writes at the beginning of a prompt


@pytest.mark.parametrize(("term", "prompt"), [("dumb", "> "), ("xterm", PASTE_ON)])
def test_tab_completes(term: str, prompt: str, observed: Running, terminal: OpenTerminal) -> None:
    """TAB completes commands, fields of /set, models and adapters, by readline and by prompt_toolkit."""
    screen = terminal("chat", "--url", observed.url, term=term)
    screen.read_until(prompt)
    for typed, completed in (("/hist", "ory"), ("/set tempera", "ture"), ("/model assistant:", "pirate")):
        screen.type(f"{typed}\t")
        screen.read_until(completed)
        screen.type("\x15")  # Ctrl-U clears the line
    screen.type("/adapter p\t")
    screen.read_until("rate")  # prompt_toolkit writes only what differs from the line before
    screen.type("\x15/bye\r")
    assert screen.wait() == 0


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/set temprature 1", "Error: there is no field 'temprature'; did you mean 'temperature'?"),
        ("/set temperature 3", "Error: temperature: 3 is not allowed; expected a number in [0, 2]"),
        ("/set seed x", "Error: seed: 'x' is not allowed"),
        ("/set n 2", "Error: n a turn has one reply"),
        ("/clera", "Error: /clera is not a command; did you mean /clear?"),
        ("/adapter parrot", "Error: assistant has no adapter 'parrot'; it has pirate"),
    ],
)
def test_mistakes_are_refused_at_once(line: str, told: str, observed: Running, terminal: OpenTerminal) -> None:
    """A misspelt field or command and a wrong value are refused before a message is sent, with what is allowed."""
    screen = terminal("chat", "--url", observed.url)
    screen.read_until("> ")
    screen.type(f"{line}\n")
    screen.read_until(told)
    screen.read_until("> ")
    screen.type("\x04")
    assert screen.wait() == 0


def test_ctrl_c_stops_one_reply(observed: Running, terminal: OpenTerminal) -> None:
    """Ctrl-C at the keyboard stops the reply, which stays in the conversation, and the next message is answered."""
    screen = terminal("chat", "--url", observed.url, "--max-tokens", "4000")
    screen.read_until("> ")
    screen.type("Hello\n")
    screen.read_until("\n")  # the terminal's echo
    while not screen.shown:  # the first tokens
        screen.poll()
    screen.type("\x03")
    screen.read_until("[stopped]\r\n")
    screen.read_until("--temperature or /set changes it]\r\n> ")
    screen.type("/set max_tokens 2\nAgain\n")
    screen.read_until("[cut off after 2 tokens: max_tokens or end of context]\r\n> ")
    screen.type("/history\n")
    screen.read_until("> Again\r\n")
    screen.read_until("\n> ")
    screen.type("\x04")
    assert screen.wait() == 0


def test_nothing_typed_is_kept_without_a_record(observed: Running, terminal: OpenTerminal, state: Path) -> None:
    """With --no-log neither the conversation nor what was typed is written anywhere."""
    screen = terminal("chat", "--url", observed.url, "--no-log", term="xterm")
    screen.read_until(PASTE_ON)
    screen.type("/help\r")
    screen.read_until("Ctrl-D ends the conversation.")
    screen.read_until(PASTE_ON)  # the prompt takes keys again
    screen.type("\x04")
    assert screen.wait() == 0
    assert not state.exists()


def test_lines_between_fences_are_one_message(observed: Running, terminal: OpenTerminal) -> None:
    """Lines between two lines of three quotation marks are one message."""
    screen = terminal("chat", "--url", observed.url, "--max-tokens", "2", "--temperature", "0")
    screen.read_until("> ")
    screen.type('"""\nOne\nTwo\n"""\n')
    screen.read_until("[cut off after 2 tokens")
    screen.read_until("> ")
    screen.type("/history\n")
    screen.read_until("> One\r\nTwo\r\n")
