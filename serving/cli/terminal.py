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


FENCE = '"""'  # alone on a line, before and behind a message of several lines

Complete = Callable[[str], list[str]]
"""Returns the words that the last word of a line may become."""


def turns(greeting: str, complete: Complete = lambda line: [], *, keep: bool = True) -> Iterator[str]:
    """Yield what the user types, without empty turns; from a pipe a line each, without greeting and prompt.

    A paste of several lines is one turn, and so are lines between two ``FENCE``. TAB completes a word by ``complete``.
    With ``keep``, what is typed is kept for the next conversation. Ctrl-C drops what is being typed; Ctrl-D ends.
    """
    terminal = sys.stdin.isatty()
    one = _reader(complete, keep=keep) if terminal else lambda prompt: input()

    def read() -> str:
        return _fenced(one("> "), one)

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


def _fenced(text: str, read: Callable[[str], str]) -> str:
    """Return ``text`` or, if it begins with a ``FENCE``, the lines up to the next one. Raises ``EOFError``."""
    if not text.lstrip().startswith(FENCE):
        return text
    lines = [text.lstrip().removeprefix(FENCE)]
    while not lines[-1].rstrip().endswith(FENCE):
        lines += read(". ").split("\n")
    lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
    return "\n".join(lines).strip("\n")


def _reader(complete: Complete, *, keep: bool) -> Callable[[str], str]:
    """Return ``read(prompt)`` of a terminal: readline's where it cannot move its cursor, else prompt_toolkit's."""
    if os.environ.get("TERM", "dumb") == "dumb" or not sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            _set_up_readline(complete)
        return input
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def new_line(event: object) -> None:
        event.current_buffer.insert_text("\n")  # type: ignore[attr-defined]

    class Words(Completer):
        """``complete`` as prompt_toolkit asks it."""

        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
            line = document.text_before_cursor
            for word in complete(line):
                yield Completion(word, start_position=-len(line.rpartition(" ")[2]))

    file = history_file() if keep else None
    history = InMemoryHistory() if file is None else FileHistory(str(file))
    session: PromptSession[str] = PromptSession(
        history=history, key_bindings=keys, prompt_continuation=". ", completer=Words(), complete_while_typing=False
    )
    return lambda prompt: session.prompt(prompt)


def _set_up_readline(complete: Complete) -> None:
    """Give ``input`` its line editing, and TAB."""
    import readline

    found: list[str] = []

    def completed(word: str, state: int) -> str | None:
        if state == 0:
            found[:] = complete(readline.get_line_buffer()[: readline.get_endidx()])
        return found[state] if state < len(found) else None

    readline.set_completer_delims(" ")
    readline.set_completer(completed)
    editline = "libedit" in (readline.__doc__ or "")  # which macOS has in its place
    readline.parse_and_bind("bind ^I rl_complete" if editline else "tab: complete")


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
