"""The terminal of a conversation: line editing, and word wrap of streamed text."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import click

HISTORY = "chat_history"


def turns(greeting: str) -> Iterator[str]:
    """Yield what the user types, without empty turns; from a pipe a line each, without greeting and prompt.

    A paste of several lines is one turn. Ctrl-C drops what is being typed; Ctrl-D ends.
    """
    terminal = sys.stdin.isatty()
    read = _reader() if terminal else input
    if terminal:
        click.echo(greeting, err=True)
    while True:
        try:
            text = read()
        except EOFError:
            if terminal:
                click.echo()
            return
        except KeyboardInterrupt:  # may be meant for an answer that has just ended
            if not terminal:
                raise SystemExit(130) from None  # as shells say it of what SIGINT ended
            click.echo("\n[Ctrl-D quits]")
            continue
        if text.strip():
            yield text


def _reader() -> Callable[[], str]:
    if os.environ.get("TERM", "dumb") == "dumb" or not sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its line editing
        return lambda: input("> ")
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def new_line(event: object) -> None:
        event.current_buffer.insert_text("\n")  # type: ignore[attr-defined]

    file = history_file()
    history = InMemoryHistory() if file is None else FileHistory(str(file))
    session: PromptSession[str] = PromptSession(history=history, key_bindings=keys, prompt_continuation=". ")
    return lambda: session.prompt("> ")


def history_file() -> Path | None:
    """Return the file of typed turns, readable by the user alone; None where it cannot be written or is another
    user's."""
    from ..control.settings import default_state_dir

    try:
        file = default_state_dir() / HISTORY
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(file, os.O_CREAT | os.O_APPEND | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    with os.fdopen(descriptor, "ab"):
        if os.fstat(descriptor).st_uid != os.geteuid():
            return None
        os.fchmod(descriptor, 0o600)
    return file


class Wrapped:
    """Word wrap of streamed text: a word that does not fit on its line any more moves to the next.

    ``columns`` None, where standard output is no terminal, leaves the text as it is.
    """

    def __init__(self, write: Callable[[str], None], columns: int | None) -> None:
        self._write = write
        self._columns = columns
        self._column = 0
        self._word = ""

    @classmethod
    def on_stdout(cls) -> Wrapped:
        clever = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        return cls(_echo, shutil.get_terminal_size().columns - 1 if clever else None)

    def write(self, text: str) -> None:
        if self._columns is None:
            self._write(text)
            return
        out: list[str] = []
        for character in text:
            out.append(self._placed(character, self._columns))
        self._write("".join(out))

    def _placed(self, character: str, columns: int) -> str:
        if character == "\n":
            self._column, self._word = 0, ""
            return character
        width = _width(character)
        if character.isspace():
            self._word = ""
            if self._column + width >= columns:  # a blank at the end of a line is the line's end
                self._column = 0
                return "\n"
            self._column += width
            return character
        if self._column + width <= columns:
            self._column += width
            self._word += character
            return character
        moved = sum(map(_width, self._word))
        if moved + width > columns // 2:  # too long to move: it is broken
            self._column, self._word = width, character
            return f"\n{character}"
        back = f"\x1b[{moved}D\x1b[K" if moved else ""
        self._word += character
        self._column = moved + width
        return f"{back}\n{self._word}"


def _width(character: str) -> int:
    """Return the terminal columns of a character: two where it is wide, none where it combines with the one before."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _echo(text: str) -> None:
    click.echo(text, nl=False)
