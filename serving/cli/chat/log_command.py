"""``mlflow-llm logs``: the conversations that were held in the terminal."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from ...system.escape import visible, visible_line
from .log_database import FILE, OFF, LogDatabase, LogError, LoggedTurn, default_directory, is_on

TEXT_COLUMNS = 60
_COUNT = click.option("-n", "--count", default=20, show_default=True, type=click.IntRange(0), help="How many; 0: all.")
_WORDS = click.option("-q", "--query", default="", help="Only turns with all these words.")
_MODEL = click.option("--model", help="Only turns with this endpoint or endpoint:adapter.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@contextlib.contextmanager
def _database() -> Iterator[LogDatabase]:
    try:
        database = LogDatabase(default_directory(), make=False)
        with contextlib.closing(database):
            yield database
    except LogError as error:
        raise click.ClickException(visible_line(str(error))) from None


@click.group(invoke_without_command=True)
@click.pass_context
def logs(context: click.Context) -> None:
    """Show conversations held with chat.

    They are recorded in a SQLite file in the user's state directory, which only the user can read. Without a command,
    the newest turns are listed.
    """
    if context.invoked_subcommand is None:
        context.invoke(list_)


@logs.command("list")
@_COUNT
@_WORDS
@_MODEL
@_JSON
def list_(count: int = 20, query: str = "", model: str | None = None, as_json: bool = False) -> None:
    """List the newest turns, a line each."""
    with _database() as database:
        found = database.newest(count, words=query, model=model)
    if as_json:
        _print_json(found)
        return
    for turn in found:
        click.echo(f"{_time(turn)}  {turn.conversation}  {visible_line(turn.model)}  {_line(turn.prompt)}")


@logs.command()
@click.argument("conversation", required=False)
@_JSON
def show(conversation: str | None, as_json: bool) -> None:
    """Show a conversation: the last, or one by the beginning of its id."""
    with _database() as database:
        found = database.branch(database.conversation(conversation))
    if as_json:
        _print_json(found)
        return
    click.echo(f"# {found[0].conversation}  {_time(found[0])}  {visible_line(found[0].place)}")
    for turn in found:
        click.echo(f"\n> {visible(turn.prompt)}\n\n{visible(turn.reply)}\n\n{_facts(turn)}")


@logs.command()
@click.argument("words", nargs=-1, required=True)
@_COUNT
@_MODEL
@_JSON
def search(words: tuple[str, ...], count: int, model: str | None, as_json: bool) -> None:
    """Show the turns that contain all WORDS."""
    with _database() as database:
        found = database.newest(count, words=" ".join(words), model=model)
    if as_json:
        _print_json(found)
        return
    for turn in found:
        click.echo(f"{_time(turn)}  {turn.conversation}  {visible_line(turn.model)}")
        for name, text in (("  >", turn.prompt), ("   ", turn.reply)):
            click.echo(f"{name} {_line(text, ' '.join(words).casefold().split())}")
    if not found:
        raise SystemExit(1)  # as grep says it


@logs.command()
def path() -> None:
    """Print the path of the SQLite file."""
    with _told():
        click.echo(str(default_directory() / FILE))


@logs.command()
def off() -> None:
    """Record no further conversations."""
    with _told():
        directory = default_directory()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (directory / OFF).touch(mode=0o600)
        _say(on=False)


@logs.command()
def on() -> None:
    """Record conversations again."""
    with _told():
        (default_directory() / OFF).unlink(missing_ok=True)
        _say(on=is_on(default_directory()))


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (LogError, OSError) as error:
        raise click.ClickException(visible_line(str(error))) from None


def _say(*, on: bool) -> None:
    click.echo(f"conversations are {'' if on else 'not '}recorded", err=True)


def _print_json(found: list[LoggedTurn]) -> None:
    click.echo(json.dumps([_wire(turn) for turn in found], indent=2))


def _wire(turn: LoggedTurn) -> dict[str, Any]:
    return asdict(turn)


def _time(turn: LoggedTurn) -> str:
    return datetime.datetime.fromtimestamp(turn.ended_ms / 1000).strftime("%Y-%m-%d %H:%M")


def _line(text: str, words: list[str] | None = None) -> str:
    """Return a part of a text in one line: its beginning, or what is around the first of ``words`` in it."""
    text = " ".join(text.split())
    places = [at for word in words or () if (at := text.casefold().find(word)) >= 0]
    start = max(0, min(places, default=0) - TEXT_COLUMNS // 3)
    shown = text[start : start + TEXT_COLUMNS]
    return visible_line(f"{'…' * (start > 0)}{shown}{'…' * (start + TEXT_COLUMNS < len(text))}")


def _facts(turn: LoggedTurn) -> str:
    tokens = "" if turn.completion_tokens is None else f", {turn.prompt_tokens} + {turn.completion_tokens} tokens"
    return f"[{visible_line(turn.model)}{tokens}, {turn.seconds:.1f} s, {visible_line(turn.finish)}]"
