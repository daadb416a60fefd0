"""``--key`` and ``--key-file``: secrets passed to a command without showing them to the machine's users."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from .shared_options import SharedOption

VARIABLE = "MLFLOW_LLM_KEY"
KEY = (
    f"API key ({VARIABLE}): @FILE, or - for a line of standard input. Every user of this machine sees a key "
    "on the command line in ps."
)
MAX_BYTES = 65_536


class Secret(click.ParamType):
    """The secret itself, ``@FILE`` or ``-`` for the first line of standard input."""

    name = "key"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "KEY|@FILE|-"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if text == "-":
            return self._checked(sys.stdin.readline(MAX_BYTES), "standard input", param, ctx)
        if text.startswith("@"):
            return self._checked(self._read(text[1:], param, ctx), text[1:], param, ctx)
        return self._checked(text, "the value", param, ctx)

    def _read(self, path: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            with Path(path).open("rb") as file:
                return file.read(MAX_BYTES).decode()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "is not text"
            self.fail(f"{path}: {reason}", param, ctx)

    def _checked(self, text: str, source: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        found = text.strip()
        if not found or not found.isascii() or not found.isprintable() or " " in found:
            # never the text itself
            self.fail(f"{source} contains no key; expected one line of printable ASCII", param, ctx)
        return found


class SecretFile(Secret):
    """The path of a file that has the secret alone."""

    name = "file"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return self._checked(self._read(str(value), param, ctx), str(value), param, ctx)


def key_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--key`` and ``--key-file``; the command gets ``key``."""

    @functools.wraps(command)
    def with_key(*arguments: Any, key: str | None, key_file: str | None, **options: Any) -> Any:
        if key_file is not None:
            if click.get_current_context().get_parameter_source("key") is ParameterSource.COMMANDLINE:
                raise click.UsageError("--key and --key-file: give one of them")
            key = key_file
        return command(*arguments, key=key, **options)

    file = click.option("--key-file", cls=SharedOption, type=SecretFile(), help="File that contains the API key.")
    literal = click.option("--key", cls=SharedOption, envvar=VARIABLE, type=Secret(), help=KEY)
    return literal(file(with_key))
