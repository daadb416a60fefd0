"""The record of conversations: a SQLite file of the user, which several processes write at once.

::

    conversations   id, place (server's URL or model's URI), started_ms
    turns           id, conversation, parent: the turn before, so that a reply asked for again is a branch
    attachments     digest, media_type, content
    turn_attachments  turn, position, digest: the parts that a message has beside its text

``PRAGMA user_version`` is the version of the schema; ``MIGRATIONS`` brings an older file to the newest.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE, OFF = "logs.db", "logs-off"
BUSY_SECONDS = 30.0
OBJECTS = ("fields", "defaults")  # columns with JSON

MIGRATIONS = (
    """
    CREATE TABLE conversations (
        id TEXT PRIMARY KEY, place TEXT NOT NULL, started_ms INTEGER NOT NULL
    );
    CREATE TABLE turns (
        id TEXT PRIMARY KEY,
        conversation TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
        parent TEXT NOT NULL,
        model TEXT NOT NULL, system TEXT, fields TEXT NOT NULL, defaults TEXT NOT NULL,
        prompt TEXT NOT NULL, reply TEXT NOT NULL, finish TEXT NOT NULL,
        prompt_tokens INTEGER, cached_tokens INTEGER, completion_tokens INTEGER,
        first_ms REAL, seconds REAL NOT NULL, request_id TEXT NOT NULL, ended_ms INTEGER NOT NULL
    );
    CREATE INDEX turns_of ON turns(conversation, id);
    CREATE TABLE attachments (digest TEXT PRIMARY KEY, media_type TEXT NOT NULL, content BLOB NOT NULL);
    CREATE TABLE turn_attachments (
        turn TEXT NOT NULL REFERENCES turns(id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        digest TEXT NOT NULL REFERENCES attachments(digest),
        PRIMARY KEY (turn, position)
    );
    """,
)


class LogError(Exception):
    """The record cannot be read or written; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTurn:
    """A message and its reply, as they are recorded. ``fields`` are the user's, ``defaults`` the command's."""

    id: str
    conversation: str
    parent: str
    place: str
    model: str
    system: str | None
    fields: dict[str, Any]
    defaults: dict[str, Any]
    prompt: str
    reply: str
    finish: str
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    first_ms: float | None
    seconds: float
    request_id: str
    ended_ms: int


def default_directory() -> Path:
    """Return the user's state directory. Raises ``LogError`` for a user without one."""
    from ...control.settings import default_state_dir

    try:
        return default_state_dir()
    except OSError as error:
        raise LogError(str(error)) from None


def is_on(directory: Path) -> bool:
    """Return whether conversations are recorded, as ``mlflow-llm logs on|off`` says."""
    return not (directory / OFF).exists()


def new_id() -> str:
    """Return an id that sorts by time, and differs from those of other processes."""
    return f"{time.time_ns() // 1000:014x}{secrets.token_hex(3)}"


class LogDatabase:
    """The record in ``directory``; the file is readable by the user alone. All methods raise ``LogError``."""

    def __init__(self, directory: Path, *, make: bool = True) -> None:
        self.path = directory / FILE
        with _told(self.path):
            if make:
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                os.close(_private(self.path))
            elif not self.path.exists():
                raise LogError(f"no conversation has been recorded: there is no {self.path}")
            # sqlite3 would begin transactions by itself, and later than their first read
            self._connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
            self._connection.row_factory = sqlite3.Row
            self._connection.create_function("has_words", 2, _has_words, deterministic=True)
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA foreign_keys = ON")
                self._migrate()
            except BaseException:
                self._connection.close()
                raise

    def close(self) -> None:
        self._connection.close()

    def _migrate(self) -> None:
        with self._writing() as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > len(MIGRATIONS):
                raise LogError(f"{self.path} was written by a newer version of mlflow-llm (schema {version})")
            for script in MIGRATIONS[version:]:
                for statement in filter(str.strip, script.split(";")):
                    connection.execute(statement)
            if version < len(MIGRATIONS):
                connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection in a transaction that holds the write lock from its beginning on."""
        with _told(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def add(self, turn: LoggedTurn, parts: list[dict[str, Any]]) -> None:
        """Record a turn; its conversation is made where it is new. ``parts`` are the images of its message."""
        row = {name: getattr(turn, name) for name in LoggedTurn.__slots__ if name != "place"}
        row |= {name: json.dumps(row[name], ensure_ascii=False) for name in OBJECTS}
        with self._writing() as connection:
            connection.execute(
                "INSERT INTO conversations VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                (turn.conversation, turn.place, turn.ended_ms),
            )
            names = ", ".join(row)
            connection.execute(f"INSERT INTO turns ({names}) VALUES ({', '.join(f':{name}' for name in row)})", row)
            for position, part in enumerate(parts):
                media_type, content = decoded(part)
                digest = hashlib.sha256(content).hexdigest()
                values = (digest, media_type, content)
                connection.execute("INSERT INTO attachments VALUES (?, ?, ?) ON CONFLICT DO NOTHING", values)
                connection.execute("INSERT INTO turn_attachments VALUES (?, ?, ?)", (turn.id, position, digest))

    def newest(self, limit: int | None, *, words: str = "", model: str | None = None) -> list[LoggedTurn]:
        """Return the newest turns, the oldest of them first; ``words`` must all be in a turn's prompt or reply."""
        where, values = ["1"], []
        if words:
            where.append("has_words(turns.prompt || char(10) || turns.reply, ?)")
            values.append(words.casefold())
        if model is not None:
            where.append("turns.model = ?")
            values.append(model)
        found = self._read(f"{' AND '.join(where)} ORDER BY turns.id DESC LIMIT ?", [*values, limit or -1])
        return found[::-1]

    def branch(self, conversation: str) -> list[LoggedTurn]:
        """Return the turns that lead to the newest one of a conversation, in order."""
        by_id = {turn.id: turn for turn in self._read("turns.conversation = ? ORDER BY turns.id", [conversation])}
        found: list[LoggedTurn] = []
        turn = by_id[max(by_id)] if by_id else None
        while turn is not None:
            found.append(turn)
            turn = by_id.get(turn.parent)
        return found[::-1]

    def conversation(self, beginning: str | None = None) -> str:
        """Return the id of the conversation that begins so; without one, of the last. Raises ``LogError``."""
        if beginning is None:
            newest = self.newest(1)
            if not newest:
                raise LogError("no conversation has been recorded yet")
            return newest[0].conversation
        with _told(self.path):
            query = "SELECT id FROM conversations WHERE substr(id, 1, ?) = ? LIMIT 2"
            rows = self._connection.execute(query, (len(beginning), beginning)).fetchall()
        if len(rows) != 1:
            problem = "several conversations begin" if rows else "no conversation begins"
            raise LogError(f"{problem} with {beginning!r}; mlflow-llm logs list shows them")
        return str(rows[0]["id"])

    def parts(self, turn: str) -> list[dict[str, Any]]:
        """Return the images of a turn's message, as parts of a message."""
        query = (
            "SELECT media_type, content FROM turn_attachments JOIN attachments USING (digest) "
            "WHERE turn = ? ORDER BY position"
        )
        with _told(self.path):
            return [encoded(*row) for row in self._connection.execute(query, (turn,))]

    def _read(self, where: str, values: list[Any]) -> list[LoggedTurn]:
        query = (
            "SELECT turns.*, conversations.place FROM turns "
            "JOIN conversations ON conversations.id = turns.conversation WHERE "
        )
        with _told(self.path):
            rows = self._connection.execute(query + where, values).fetchall()
        return [LoggedTurn(**{**row, **{name: json.loads(row[name]) for name in OBJECTS}}) for row in rows]


def encoded(media_type: str, content: bytes) -> dict[str, Any]:
    """Return an image as a part of a message."""
    data = base64.b64encode(content).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}


def decoded(part: dict[str, Any]) -> tuple[str, bytes]:
    """Return media type and bytes of a part that ``encoded`` made."""
    head, _, data = part["image_url"]["url"].partition(",")
    return head.removeprefix("data:").removesuffix(";base64"), base64.b64decode(data)


def _has_words(text: str, words: str) -> bool:
    """Return whether all ``words``, which are casefolded, are in ``text``: SQLite's LIKE knows only ASCII's cases."""
    text = text.casefold()
    return all(word in text for word in words.split())


def _private(path: Path) -> int:
    """Open the file, made readable for the user alone. Raises ``OSError`` for a link and for another user's file."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(f"{path} belongs to another user")
    os.fchmod(descriptor, 0o600)
    return descriptor


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn errors of the file system and of SQLite into a ``LogError`` that names the file."""
    try:
        yield
    except OSError as error:
        raise LogError(f"{path}: {error.strerror or error}") from None
    except sqlite3.Error as error:
        raise LogError(f"{path}: {error}") from None
