"""Recording a conversation while it is held, and taking one up again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import click

from ...system.escape import visible_line
from .conversation import Asked, Conversation, Turn
from .log_database import LogDatabase, LogError, LoggedTurn, default_directory, is_on, new_id
from .message_parts import images_in, text_of

LOADED = "loaded"  # how a turn ended that came from a file


class Recorder:
    """The record of one command's conversations; it does nothing where conversations are not recorded.

    A record that cannot be written is reported once, and the conversation goes on.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._database: LogDatabase | None = None
        if not wanted:
            return
        try:
            directory = default_directory()
            if is_on(directory):
                self._database = LogDatabase(directory)
        except LogError as error:
            self._give_up(error)

    @property
    def records(self) -> bool:
        return self._database is not None

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    def record(self, talk: Conversation, user: dict[str, Any], asked: Asked) -> Turn:
        """Record a turn behind those of ``talk``, and return it."""
        talk.turns = list(self._recorded(talk, talk.turns))
        parent = talk.turns[-1].id if talk.turns else ""
        return self._add(talk, Turn(user=user, asked=asked, id=new_id(), parent=parent))

    def _recorded(self, talk: Conversation, turns: list[Turn]) -> Iterator[Turn]:
        """Yield ``turns``, of which those that came from a file are recorded first."""
        parent = ""
        for turn in turns:
            recorded = turn if turn.id else self._add(talk, dataclasses.replace(turn, id=new_id(), parent=parent))
            parent = recorded.id
            yield recorded

    def _add(self, talk: Conversation, turn: Turn) -> Turn:
        if self._database is None:
            return turn
        talk.log_id = talk.log_id or turn.id
        try:
            self._database.add(_logged(talk, turn), images_in(turn.user))
        except LogError as error:
            self._give_up(error)
        return turn

    def _give_up(self, error: LogError) -> None:
        click.echo(f"[this conversation is not recorded: {visible_line(str(error))}]", err=True)
        self.close()
        self._database = None


def _logged(talk: Conversation, turn: Turn) -> LoggedTurn:
    usage: dict[str, Any] = turn.asked.usage or {}
    first = turn.asked.first
    return LoggedTurn(
        id=turn.id,
        conversation=talk.log_id,
        parent=turn.parent,
        place=talk.place,
        model=talk.model,
        system=talk.system,
        fields={name: value for name, value in talk.fields.items() if name != "model"},
        defaults=talk.defaults(),
        prompt=text_of(turn.user),
        reply=turn.asked.text,
        finish=turn.asked.finish,
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        first_ms=None if first is None else round(first * 1e3, 3),
        seconds=round(turn.asked.seconds, 6),
        request_id=turn.asked.request_id,
        ended_ms=time.time_ns() // 1_000_000,
    )


def taken_up(beginning: str | None) -> tuple[list[LoggedTurn], list[Turn]]:
    """Return the turns of the last conversation, or of the one whose id begins so. Raises ``ClickException``."""
    try:
        database = LogDatabase(default_directory(), make=False)
        try:
            logged = database.branch(database.conversation(beginning))
            return logged, [_turn(one, database.parts(one.id)) for one in logged]
        finally:
            database.close()
    except LogError as error:
        raise click.ClickException(f"--continue: {error}") from None


def _turn(logged: LoggedTurn, parts: list[dict[str, Any]]) -> Turn:
    content: Any = [*parts, {"type": "text", "text": logged.prompt}] if parts else logged.prompt
    asked = Asked(
        text=logged.reply,
        finish=logged.finish,
        usage=None,
        request_id=logged.request_id,
        first=None,
        seconds=logged.seconds,
    )
    return Turn(user={"role": "user", "content": content}, asked=asked, id=logged.id, parent=logged.parent)
