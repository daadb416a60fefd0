"""``mlflow-llm run``: load a model here and chat with it. Its options are those of ``chat`` that need no server."""

from __future__ import annotations

import copy
from typing import Any

import click

from .chat.command import chat
from .http import URL_VARIABLE
from .shared_options import conversation_options

OF_A_SERVER = ("url", "key", "key_file", "model_uri")
HELP = {
    "config": "Engine setting (mlflow-llm help settings); repeatable.",
    "model": "The base or one of its adapters, as NAME:ADAPTER.",
}


def _parameters() -> list[click.Parameter]:
    kept = [copy.copy(one) for one in chat.params if one.expose_value and one.name not in OF_A_SERVER]
    for one in kept:
        if isinstance(one, click.Option) and one.name in HELP:
            one.help = HELP[one.name]
    place = click.Argument(["model_uri"], metavar="MODEL")
    arguments = [one for one in kept if isinstance(one, click.Argument)]
    return [place, *arguments, *(one for one in kept if one not in arguments)]


def _run(**given: Any) -> None:
    assert chat.callback is not None
    chat.callback(url="", key=None, key_file=None, **given)


PARAMETERS = _parameters()
run = click.Command(
    "run",
    callback=_run,
    params=PARAMETERS,
    help=f"""Load a model on this machine and chat with it.

    MODEL is a directory, a GGUF file, a registered model (NAME, NAME/VERSION, NAME@ALIAS or models:/…), or a hub id.
    What is a model's directory or file here is taken before a registered model of the same name.

    With MESSAGE, the command prints one answer. Without it, the command holds a conversation. No server is asked, also
    where {URL_VARIABLE} is set; the engine ends with the command.

    {conversation_options(PARAMETERS)}
    """,
)
