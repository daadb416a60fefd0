"""The command ``mlflow-llm``. Each subcommand is a module of this package."""

from __future__ import annotations

import os
import sys
from collections import UserDict
from importlib import import_module
from typing import Any

import click

from mlflow_llm import __version__

from ..interface.errors import PackagingError, ServingError
from . import start_log
from .advice import AdvisingGroup

COMPLETE = "_MLFLOW_LLM_COMPLETE"
"""The variable in which a shell asks for completions (``completion``)."""
QUICK = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""A person who waits at a command is told within seconds that a tracking server is down, unless these are set."""

COMMANDS = {  # the module of each, and its name in there where that is another
    "run": "run",
    "serve": "serve.command:serve",
    "engine": "serve.engine:engine",
    "engines": "endpoints.engines:engines",
    "engine-key": "serve.engine:engine_key",
    "keys": "accounts.keys:keys",
    "limits": "accounts.limits:limits",
    "prices": "accounts.prices:prices",
    "usage": "accounts.usage:usage",
    "audit": "accounts.audit:audit",
    "endpoints": "endpoints.command:endpoints",
    "top": "endpoints.top:top",
    "chat": "chat.command:chat",
    "logs": "chat.log_command:logs",
    "models": "models.listing:models",
    "pull": "models.changes:pull",
    "rm": "models.changes:rm",
    "ps": "models.listing:ps",
    "stop": "models.changes:stop",
    "export": "models.export:export",
    "promote": "promote.command:promote",
    "import": "convert.command:import_",
    "windows": "accounts.windows:windows",
    "ledger": "accounts.ledger:ledger",
    "replay": "accounts.replay:replay",
    "verify": "accounts.replay:verify",
    "receipt": "accounts.receipt:receipt",
    "batch": "batch.command:batch",
    "bench": "bench",
    "doctor": "doctor",
    "spec": "serve.spec_schema:spec",
    "completion": "completion",
    "help": "help:show",
}


class Commands(UserDict[str, click.Command]):
    """Each command by name. Its module is imported when it is asked for: no other's libraries are."""

    def __init__(self) -> None:
        super().__init__()
        self.data: dict[str, Any] = dict.fromkeys(COMMANDS)

    def __getitem__(self, name: str) -> click.Command:
        place, _, attribute = COMMANDS[name].partition(":")
        command: click.Command = getattr(import_module(f"{__name__}.{place}"), attribute or place)
        return command


@click.group(cls=AdvisingGroup, context_settings={"help_option_names": ["-h", "--help"]}, commands=Commands())
@click.version_option(__version__)
def cli() -> None:
    """Serve language models logged with MLflow."""


def main() -> None:
    """Run the console script, with our own errors in one line, without a trace."""
    for name, value in QUICK.items():
        os.environ.setdefault(name, value)
    try:
        cli(complete_var=COMPLETE)
    except (ServingError, PackagingError) as error:
        start_log.fail(error)
        sys.exit(1)
