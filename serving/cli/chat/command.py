"""``mlflow-llm chat``: a conversation in the terminal, streamed, with a server or with a model of this machine."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

import click

from ...interface.errors import without_password
from ...system.escape import visible_line
from ..http import Client, first_model, url_options
from ..local_model import LocalModel
from ..shared_options import ConversationOption
from ..terminal import turns
from . import slash_commands
from .asking import STOPPED, ask
from .conversation import Conversation, Server
from .log_record import Recorder, taken_up
from .message_parts import image_file, message
from .output_schema import response_format
from .set_field import NAMES
from .tab_completion import candidates

INTERRUPTED_STATUS = 130  # as shells say it of what SIGINT ended
conversation_option = functools.partial(click.option, cls=ConversationOption)


@click.command()
@url_options
@click.option(
    "-m", "--model-uri", help="Run this logged model, Hugging Face directory or hub id here, without a server."
)
@click.option(
    "-C",
    "--config",
    "config",
    multiple=True,
    metavar="KEY=VALUE",
    help="With -m: engine setting (mlflow-llm help settings); repeatable.",
)
@click.option("--model", help="Endpoint or endpoint:adapter (default: the server's first).")
@conversation_option("--system", help="System message.")
@conversation_option(
    "--max-tokens", type=click.IntRange(1), help="Maximum number of tokens of a reply (default: 1024)."
)
@conversation_option(
    "--temperature",
    type=click.FloatRange(0, 2),
    help="Sampling temperature (default: the model's own sampling values, or 0.7 for one that has none).",
)
@conversation_option("--seed", type=int, help="The same seed gives the same answer.")
@conversation_option(
    "--schema", help="Hold the replies to a JSON schema: FILE, JSON, or fields such as 'name, age int'."
)
@conversation_option(
    "-a", "--attach", "attached", multiple=True, metavar="FILE", help="Send an image with the message; repeatable."
)
@conversation_option("-c", "--continue", "again", is_flag=True, help="Continue the last conversation.")
@conversation_option("--conversation", metavar="ID", help="Continue this conversation (mlflow-llm logs).")
@conversation_option("--no-log", is_flag=True, help="Do not record the conversation (mlflow-llm logs).")
@conversation_option("--stats", is_flag=True, help="Print tokens and times of each answer on standard error.")
@click.argument("message", required=False)
def chat(
    url: str,
    key: str | None,
    model_uri: str | None,
    config: tuple[str, ...],
    model: str | None,
    system: str | None,
    schema: str | None,
    attached: tuple[str, ...],
    again: bool,
    conversation: str | None,
    no_log: bool,
    stats: bool,
    message: str | None,
    **sampling: Any,
) -> None:
    """Chat with a model.

    With MESSAGE, the command prints one answer; standard input, if it is a pipe or a file, is put before MESSAGE.
    Without it, the command holds a conversation: Ctrl-C stops an answer or clears the line, TAB completes, /help lists
    commands, and Ctrl-D ends the conversation.
    """
    if config and model_uri is None:
        raise click.UsageError("-C goes with -m; a server has its own settings")
    fields = {name: value for name, value in sampling.items() if value is not None}
    if schema is not None:
        fields["response_format"] = response_format(schema)
    images = [image_file(path) for path in attached]
    text = None if message is None else _joined(message)
    with contextlib.ExitStack() as stack:
        talk = Conversation(_server(stack, url, key, model_uri, config), fields, system, stats)
        talk.place = without_password(url) if model_uri is None else model_uri
        if again or conversation is not None:
            _take_up(talk, conversation)
        _address(talk, model)
        talk.attached = images
        recorder = Recorder(wanted=not no_log)
        stack.callback(recorder.close)
        if text is None:
            _converse(talk, recorder)
        elif _turn(talk, recorder, text):
            raise SystemExit(INTERRUPTED_STATUS)


def _server(
    stack: contextlib.ExitStack, url: str, key: str | None, model_uri: str | None, config: tuple[str, ...]
) -> Server:
    if model_uri is None:
        return Client(url, key)
    return stack.enter_context(LocalModel.loaded(model_uri, config))


def _joined(message: str) -> str:
    """Return the message behind what standard input has, if that is not a terminal. Raises ``ClickException``."""
    if sys.stdin is None or sys.stdin.isatty():
        return message
    try:
        piped = sys.stdin.read()
    except UnicodeDecodeError:
        raise click.ClickException("standard input is not text in UTF-8; -a FILE sends an image") from None
    except OSError:  # closed by the caller
        return message
    return f"{piped.rstrip()}\n\n{message}" if piped.strip() else message


def _take_up(talk: Conversation, beginning: str | None) -> None:
    """Go on with a recorded conversation: its turns, and its settings where none are given."""
    logged, talk.turns = taken_up(beginning)
    last = logged[-1]
    talk.log_id = last.conversation
    talk.system = last.system if talk.system is None else talk.system
    kept = {name: value for name, value in last.fields.items() if name in NAMES}
    talk.fields = kept | talk.fields
    talk.told_defaults = True
    if talk.place == last.place:
        talk.fields["model"] = last.model


def _address(talk: Conversation, model: str | None) -> None:
    """Choose the endpoint or adapter: the one that is named, else that of a conversation taken up, else the first."""
    if isinstance(talk.server, Client):
        if model is not None:
            talk.fields["model"] = model
        elif "model" not in talk.fields:
            talk.fields["model"] = first_model(talk.server)
        with contextlib.suppress(click.ClickException):  # a key without the list may still chat
            talk.read_cards()
        return
    named = model or talk.fields.get("model")
    talk.fields["model"] = next(iter(talk.read_cards()))
    if named:  # a loaded model takes any name for its own, as OpenAI's clients need it
        talk.choose(named)


def _converse(talk: Conversation, recorder: Recorder) -> None:
    """Hold a conversation. A turn that fails is removed, and the conversation goes on."""
    failed = False
    greeting = f"chatting with {visible_line(talk.model)}; /help lists commands, Ctrl-D quits"
    for text in turns(greeting, functools.partial(candidates, talk), keep=recorder.records):
        try:
            if text.startswith("/") and not text.startswith("//"):
                slash_commands.run(talk, text.strip())
                continue
            _turn(talk, recorder, text.removeprefix("/") if text.startswith("//") else text)
        except slash_commands.Quit:
            break
        except slash_commands.Retry:
            failed = _retried(talk, recorder) or failed
        except click.ClickException as error:
            error.show()
            failed = True
    if failed and not sys.stdin.isatty():
        raise SystemExit(1)


def _retried(talk: Conversation, recorder: Recorder) -> bool:
    """Ask the last message again; the old reply stays if that fails. Return whether it did."""
    *before, last = talk.turns
    talk.turns = before
    try:
        _ask(talk, recorder, last.user)
    except click.ClickException as error:
        error.show()
    if len(talk.turns) > len(before):
        return False
    talk.turns = [*before, last]
    return True


def _turn(talk: Conversation, recorder: Recorder, text: str) -> bool:
    """Ask for a reply to ``text``, with what was attached; return whether the user stopped it."""
    user = message(text, talk.attached)
    talk.attached = []
    return _ask(talk, recorder, user)


def _ask(talk: Conversation, recorder: Recorder, user: dict[str, Any]) -> bool:
    asked = ask(talk, [*talk.messages, user])
    if asked.text:  # else it was stopped before anything came
        turn = recorder.record(talk, user, asked)
        talk.turns.append(turn)
    return asked.finish == STOPPED
