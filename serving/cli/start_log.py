"""The lines of a command that runs a server, which belong to the log of that server from the first one on."""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

from ..interface.errors import PackagingError
from ..system import logs
from ..system.escape import visible


def begin(level: str, file: str | None = None) -> None:
    """Begin the server's log. Where standard error has been replaced (by a test, by a notebook) what the command says
    goes there as text. Raises ``PackagingError`` for a file that cannot be written."""
    if sys.stderr is not sys.__stderr__:
        return
    try:
        logs.take_over(level, file)
    except OSError as error:
        raise PackagingError(f"--log-file {file}: {error.strerror}") from None


def say(sentence: str, event: str | None = None, *, level: int = logging.INFO, **fields: Any) -> None:
    """Say a sentence: in the log, with ``event`` and ``fields`` for programs, if this process has one; else as text on
    standard error."""
    if not logs.is_configured():
        click.echo(visible(sentence), err=True)
        return
    logs.event(event or sentence, level=level, sentence=sentence if event or logs.is_terminal() else None, **fields)
    logs.flush()  # a step may be drawn on the next line


def fail(error: Exception) -> None:
    """Say why the command ends."""
    say(f"Error: {error}", "failed", level=logging.ERROR, error=str(error))
