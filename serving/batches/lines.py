"""The lines of a batch's input: cut into chunks when a file is uploaded, checked before a batch runs.

A chunk ends at the end of a line, so a line is read with one chunk. A line is OpenAI's
``{"custom_id", "method": "POST", "url", "body"}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from ..dialects.fields.label_fields import label
from ..interface.errors import InvalidField
from ..interface.readers import Entry, obj, one_of, record
from .objects import LineError

CHUNK_BYTES = 256 * 2**10
MAX_ERRORS = 100
MAX_CUSTOM_ID = 512
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_LINE = record(
    custom_id=Entry(label(1, MAX_CUSTOM_ID), "Your own id of the request", required="an id of your own"),
    method=Entry(one_of("POST"), required='"POST"'),
    url=Entry(one_of(*ENDPOINTS), required="the endpoint of the batch"),
    body=Entry(obj, "The request", required="a request"),
)
_decoder = msgspec.json.Decoder()


class Line(Struct, frozen=True, kw_only=True):
    """A request of a batch: ``number`` is that of its line from 1; its bytes are ``size`` of a chunk from ``start``."""

    number: int
    custom_id: str
    chunk: int
    start: int
    size: int


class Refused(Exception):
    """The input of a batch cannot be run, for these reasons."""

    def __init__(self, errors: list[LineError]) -> None:
        super().__init__(errors)
        self.errors = errors


def chunks_of(content: bytes) -> Iterator[bytes]:
    """Cut a file into chunks of whole lines, of at most ``CHUNK_BYTES`` unless a single line is longer."""
    start = 0
    while start < len(content):
        end = start + CHUNK_BYTES
        if end < len(content):
            last = content.rfind(b"\n", start, end)
            if last < 0:
                last = content.find(b"\n", end)
            end = len(content) if last < 0 else last + 1
        yield content[start:end]
        start = end


def lines_of(chunks: Iterable[bytes], endpoint: str, maximum: int) -> list[Line]:
    """Check all lines of a file and return them. Blank lines are skipped. Raises ``Refused``."""
    found: dict[str, Line] = {}
    errors: list[LineError] = []
    number = 0
    for place, chunk in enumerate(chunks):
        start = 0
        for text in chunk.splitlines(keepends=True):
            number += 1
            if text.strip():
                code = "invalid_request"
                try:
                    custom_id = _custom_id(text, endpoint)
                    if custom_id in found:
                        code = "duplicate_custom_id"
                        raise InvalidField("custom_id", custom_id, f"another id than line {found[custom_id].number}'s")
                    found[custom_id] = Line(
                        number=number, custom_id=custom_id, chunk=place, start=start, size=len(text)
                    )
                except InvalidField as error:
                    errors.append(_error(code, number, error))
                if len(errors) >= MAX_ERRORS:
                    raise Refused(errors)
            start += len(text)
    if not found and not errors:
        errors.append(_problem("empty_file", None, "the input file has no requests", None))
    if len(found) > maximum:
        errors.append(
            _problem("too_many_requests", None, f"{len(found)} requests; at most {maximum} are allowed", None)
        )
    if errors:
        raise Refused(errors)
    return list(found.values())


def _custom_id(text: bytes, endpoint: str) -> str:
    """Return the id of a valid line. Raises ``InvalidField``."""
    try:
        value: Any = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidField("line", text[:40].decode(errors="replace"), "a JSON object") from None
    line = _LINE(value, "")
    if line["url"] != endpoint:
        raise InvalidField("url", line["url"], f"{endpoint}, the endpoint of the batch")
    if line["body"].get("stream"):
        raise InvalidField("body.stream", line["body"]["stream"], "false or null: a batch has whole replies")
    found: str = line["custom_id"]
    return found


def _error(code: str, number: int, error: InvalidField) -> LineError:
    code = {"line": "invalid_json_line", "url": "mismatched_endpoint"}.get(error.param or "", code)
    return _problem(code, number, error.message, error.param)


def _problem(code: str, line: int | None, message: str, param: str | None) -> LineError:
    return {"code": code, "line": line, "message": message, "param": param}
