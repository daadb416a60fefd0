"""``/save`` and ``/load``: a conversation as a JSON file, with the messages in OpenAI's form."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
from msgspec import Struct

from ...system.escape import visible_line
from ...system.files import replace_file
from .conversation import Asked, Conversation, Turn
from .log_record import LOADED
from .set_field import check_name

KIND = "mlflow-llm conversation"


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of a user (a text, or parts of which some are images) or the reply to it."""

    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class SavedConversation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation: user and assistant in turn. ``fields`` are request fields that the user set."""

    kind: Literal["mlflow-llm conversation"]
    model: str
    system: str | None = None
    fields: dict[str, Any] = {}
    messages: tuple[Message, ...] = ()


def save(talk: Conversation, path: str) -> None:
    """Write the conversation to ``path``. Raises ``ClickException``, also for a file that is not a conversation."""
    file = _file(path)
    with _told(file):
        if file.exists():
            _read(file)  # a conversation may be replaced, another file may not
    fields = {name: value for name, value in talk.fields.items() if name != "model"}
    saved = {"kind": KIND, "model": talk.model, "system": talk.system, "fields": fields, "messages": talk.messages}
    with _told(file):
        replace_file(file, json.dumps(saved, ensure_ascii=False, indent=2).encode() + b"\n")


def load(talk: Conversation, path: str) -> None:
    """Go on with the conversation in ``path``, with its settings; the model in use stays. Raises ``ClickException``."""
    file = _file(path)
    with _told(file):
        found = _read(file)
    roles = [message.role for message in found.messages]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise click.ClickException(f"{visible_line(path)}: its messages are not of user and assistant in turn")
    for name in found.fields:
        check_name(name)
    talk.restart()
    talk.system = found.system
    talk.fields = {"model": talk.fields["model"], **found.fields}
    for user, reply in zip(found.messages[::2], found.messages[1::2], strict=True):
        asked = Asked(text=str(reply.content), finish=LOADED, usage=None, request_id="", first=None, seconds=0.0)
        talk.turns.append(Turn(user={"role": "user", "content": user.content}, asked=asked))


def _file(path: str) -> Path:
    try:
        return Path(os.path.expanduser(path))
    except ValueError:
        raise click.ClickException(f"{visible_line(path)} cannot be a file's name") from None


def _read(file: Path) -> SavedConversation:
    return msgspec.json.decode(file.read_bytes(), type=SavedConversation)


@contextlib.contextmanager
def _told(file: Path) -> Iterator[None]:
    shown = visible_line(str(file))
    try:
        yield
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise click.ClickException(f"{shown} is not a conversation that /save wrote") from None
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{shown}: {getattr(error, 'strerror', None) or 'cannot be read'}") from None
