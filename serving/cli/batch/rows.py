"""The rows of a batch's input: OpenAI's batch lines, or plain request bodies, one JSON object a line."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...dialects.fields.fields import task_of, unknown_field
from ...interface.errors import InvalidField, RequestError, shown
from ...interface.request import Task

PATHS: dict[str, Task] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/score": "score",
    "/v1/rerank": "score",
}
KEYS = ("custom_id", "method", "url", "body")
MAX_ID = 512  # characters


@dataclass(frozen=True, slots=True)
class Row:
    """A request of the input. ``key`` is a hash of its id and content, by which its answer is recognised."""

    line: int
    custom_id: str
    key: str
    path: str | None
    body: dict[str, Any]

    @property
    def asked(self) -> tuple[str, dict[str, Any]]:
        """The request's path and body. Raises ``InvalidField`` for a body of another task, or one that streams."""
        path = _path_of(self.body)
        if self.path is not None and self.path != path:
            raise InvalidField("url", self.path, f"{path}, according to the body")
        if self.body.get("stream") not in (None, False):
            raise InvalidField("stream", self.body["stream"], "false: batches do not stream")
        return path, self.body


def _path_of(body: dict[str, Any]) -> str:
    """Return the path that a body belongs to. Raises ``InvalidField``."""
    task = task_of(body, None)
    if task == "score":
        return "/v1/rerank" if body.get("query") is not None else "/v1/score"
    return next(path for path, done in PATHS.items() if done == task)


class Rows:
    """The rows of a file, read line by line on each iteration. Raises ``RequestError`` for an invalid one.

    In memory are their ``keys``, in order, and the positions of their lines.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._places = array("Q")
        self._lines = array("L")
        self.keys: dict[str, int] = {}  # to the place in this order
        ids: dict[bytes, int] = {}
        with file.open("rb") as stream:
            for line, place, text in _lines(stream):
                row = _row(text, line)
                digest = hashlib.sha256(row.custom_id.encode(errors="surrogatepass")).digest()[:12]
                if digest in ids:
                    first = ids[digest]
                    raise RequestError(f"line {line}: custom_id {shown(row.custom_id)} is also on line {first}")
                ids[digest] = line
                self.keys[row.key] = len(self._places)
                self._places.append(place)
                self._lines.append(line)

    def __len__(self) -> int:
        return len(self._places)

    def without(self, keys: set[str]) -> Iterator[Row]:
        with self._file.open("rb") as stream:
            for key, number in self.keys.items():
                if key not in keys:
                    stream.seek(self._places[number])
                    yield _row(stream.readline(), self._lines[number])


def _lines(stream: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Yield ``(number, place, text)`` of the lines that are not blank."""
    place = 0
    for number, text in enumerate(stream, 1):
        if text.strip():
            yield number, place, text
        place += len(text)


def _row(text: bytes, line: int) -> Row:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError(f"line {line}: it is not JSON") from None
    if not isinstance(found, dict):
        raise RequestError(f"line {line}: {shown(found)} is not a JSON object")
    try:
        custom_id, path, body = _batch_line(found) if "body" in found else (None, None, found)
    except InvalidField as error:
        raise RequestError(f"line {line}: {error.message}") from None
    custom_id = f"line-{line}" if custom_id is None else custom_id
    key = hashlib.sha256(custom_id.encode(errors="surrogatepass") + b"\0" + text.strip()).hexdigest()
    return Row(line, custom_id, f"batch_req_{key[:32]}", path, body)


def _batch_line(found: dict[str, Any]) -> tuple[str | None, str | None, dict[str, Any]]:
    for name in found:
        if name not in KEYS:
            raise unknown_field(name, found[name], KEYS)
    custom_id, body, path = found.get("custom_id"), found["body"], found.get("url")
    if custom_id is not None and (not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID):
        raise InvalidField("custom_id", custom_id, f"a text of 1 to {MAX_ID} characters")
    if found.get("method") not in (None, "POST"):
        raise InvalidField("method", found["method"], '"POST"')
    if path is not None and path not in PATHS:
        raise InvalidField("url", path, "one of " + ", ".join(PATHS))
    if not isinstance(body, dict):
        raise InvalidField("body", body, "a request (an object)")
    return custom_id, path, body
