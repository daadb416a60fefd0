"""The commands that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from ...dialects.fields.fields import nearest
from ...system.escape import visible, visible_line
from .conversation import Conversation
from .conversation_file import load, save
from .message_parts import image_file, images_in, text_of
from .set_field import MODEL, SYSTEM, as_json, check_name, read_value
from .summary import summary

KEYS = """\
TAB completes commands, fields, models and files. Alt-Enter begins a new line, as do lines between two lines of \"\"\".
A paste of several lines is one message. Ctrl-C stops a reply or clears the line; Ctrl-D ends the conversation.
//… sends a message that begins with a slash."""


class Quit(Exception):
    """The conversation ends."""


class Retry(Exception):
    """The last message is to be asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlashCommand:
    """A command. ``takes`` says what follows its name, for the help and for TAB: "" for nothing."""

    run: Callable[[Conversation, str], None]
    takes: str = ""
    help: str


def run(talk: Conversation, line: str) -> None:
    """Execute a command. Raises ``ClickException``, ``Quit`` and ``Retry``."""
    word, _, rest = line.partition(" ")
    name = ALIASES.get(word, word)
    command = COMMANDS.get(name)
    if command is None:
        near = nearest(word, [*COMMANDS, *ALIASES])
        raise click.ClickException(
            f"{visible_line(word)} is not a command{f'; did you mean {near}?' if near else ''}; "
            "/help lists them, //… sends a message that begins with a slash"
        )
    rest = rest.strip()
    if rest and not command.takes:
        raise click.ClickException(f"{name} takes nothing behind it")
    if not rest and command.takes and not command.takes.startswith("["):
        raise click.ClickException(f"{name} {command.takes}: {command.takes} is missing")
    command.run(talk, rest)


def _clear(talk: Conversation, _: str) -> None:
    talk.restart()


def _retry(talk: Conversation, _: str) -> None:
    if not talk.turns:
        raise click.ClickException("there is no reply to replace yet")
    raise Retry


def _history(talk: Conversation, _: str) -> None:
    if not talk.turns:
        click.echo("nothing has been said yet", err=True)
    for turn in talk.turns:
        images = len(images_in(turn.user))
        beside = f" [{images} image{'s' * (images > 1)}]" if images else ""
        click.echo(f"> {visible(text_of(turn.user))}{beside}\n{visible(turn.asked.text)}", err=True)


def _set(talk: Conversation, rest: str) -> None:
    """Set a request field, or unset it, which gives it its default again."""
    name, _, text = rest.partition(" ")
    text = text.strip()
    if not name:
        shown = talk.defaults() | talk.fields | ({SYSTEM: talk.system} if talk.system else {})
        lines = (f"{key} {json.dumps(value, ensure_ascii=False)}" for key, value in shown.items())
        click.echo(visible("\n".join(lines)), err=True)
        return
    check_name(name)
    if name == MODEL:
        _model(talk, text)
    elif name == SYSTEM:
        talk.system = str(as_json(text)) if text else None
    elif text:
        talk.fields[name] = read_value(name, text)
    else:
        talk.fields.pop(name, None)


def _system(talk: Conversation, text: str) -> None:
    if text:
        talk.system = text
    else:
        click.echo(visible(talk.system or "there is no system message"), err=True)


def _model(talk: Conversation, name: str) -> None:
    if name:
        talk.choose(name)
        return
    lines = (f"{'*' if one == talk.model else ' '} {visible_line(one)}" for one in talk.read_cards())
    click.echo("\n".join(lines), err=True)


def _adapter(talk: Conversation, name: str) -> None:
    if name:
        talk.choose_adapter(name)
        return
    base = talk.model.partition(":")[0]
    there = [card for card in talk.read_cards().values() if card.base == base and card.adapter]
    lines = [f"{'*' if one.name == talk.model else ' '} {visible_line(one.adapter)}" for one in there]
    click.echo("\n".join(lines) or f"{visible_line(base)} has no adapters", err=True)


def _attach(talk: Conversation, path: str) -> None:
    talk.attached.append(image_file(path))


def _show(talk: Conversation, _: str) -> None:
    click.echo(summary(talk), err=True)


def _help(_: Conversation, __: str) -> None:
    heads = {name: f"{name} {command.takes}".rstrip() for name, command in COMMANDS.items()}
    width = max(map(len, heads.values()))
    lines = (f"{head.ljust(width)}  {COMMANDS[name].help}" for name, head in heads.items())
    click.echo("\n".join([*lines, KEYS]), err=True)


def _quit(_: Conversation, __: str) -> None:
    raise Quit


def _command(run: Callable[[Conversation, str], Any], help: str, takes: str = "") -> SlashCommand:
    return SlashCommand(run=run, takes=takes, help=help)


COMMANDS = {
    "/clear": _command(_clear, "start a new conversation; the settings stay (also /new)"),
    "/retry": _command(_retry, "ask the last message again and replace its reply"),
    "/history": _command(_history, "show the conversation so far"),
    "/set": _command(
        _set, "set a request field (null: the server's own value), unset it, or show all", "[FIELD [VALUE]]"
    ),
    "/system": _command(_system, "set or show the system message; /set system removes it", "[TEXT]"),
    "/model": _command(_model, "switch to another endpoint or endpoint:adapter, or list them", "[NAME]"),
    "/adapter": _command(_adapter, "switch to an adapter of this endpoint, or list them", "[NAME]"),
    "/attach": _command(_attach, "send an image with the next message", "FILE"),
    "/show": _command(_show, "show the settings, and tokens, speed and cost so far"),
    "/save": _command(save, "write the conversation to a file", "FILE"),
    "/load": _command(load, "go on with a saved conversation", "FILE"),
    "/help": _command(_help, "show this help"),
    "/bye": _command(_quit, "end the conversation, like Ctrl-D"),
}
ALIASES = {"/new": "/clear", "/exit": "/bye", "/quit": "/bye", "/?": "/help"}
