"""``/v1/files``: upload, list, show, download and delete files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gevent

from ...batches.contents import content_of
from ...batches.files import DEFAULT_SECONDS, Files, check_seconds
from ...batches.objects import DeletedFile, FileList, FileObject, page_of
from ...frontend.answer import Answer, json_answer
from ...frontend.operation import Request
from ...frontend.worker_state import WorkerState
from ...interface.errors import InvalidField
from ...interface.readers import Entry, Reader, integer, one_of, reader, record
from ..query_parameters import limit_of, parameters
from .multipart import read_upload
from .queries import PAGE, ledger_of, route

FILES = "/v1/files"
ONE = f"{FILES}/<name>"
MAX_NAME = 256
MAX_LIST = 10_000
ANCHOR = "created_at"
MULTIPART = "multipart/form-data"


@reader(type="string", format="binary")
def _binary(value: Any, path: str) -> Any:
    return value


EXPIRES_AFTER: Reader[dict[str, Any]] = record(
    anchor=Entry(one_of(ANCHOR), required=f'"{ANCHOR}"'),
    seconds=Entry(integer(3600, 2_592_000), "From an hour to 30 days", required="seconds from 3600 to 2592000"),
)
UPLOAD = record(
    file=Entry(_binary, "JSONL, a request per line", required="a file"),
    purpose=Entry(one_of("batch"), required='"batch"'),
    **{
        "expires_after[anchor]": Entry(one_of(ANCHOR)),
        "expires_after[seconds]": Entry(integer(3600, 2_592_000), "How long the file is kept (30 days)"),
    },
)
LIST: dict[str, dict[str, Any]] = {
    "after": PAGE["after"],
    "limit": {**PAGE["limit"], "maximum": MAX_LIST, "description": f"Entries ({MAX_LIST})"},
    "order": {"enum": ["asc", "desc"], "description": "By time of creation (desc)"},
    "purpose": {"enum": ["batch", "batch_output"]},
}


def upload(server: WorkerState, request: Request) -> Answer:
    """Store a file. Raises ``InvalidField`` for a purpose other than batch, and ``LimitExceeded``."""
    ledger = ledger_of(server)
    kind = request.headers.get("Content-Type") or ""
    given = server.offload(len(request.body), read_upload, request.body, kind, "file")
    for name, value in given.fields.items():
        if name not in UPLOAD.schema["properties"]:
            known = ", ".join(UPLOAD.schema["properties"])
            raise InvalidField(name[:80], value, f"no such field; expected one of {known}")
    if (purpose := given.fields.get("purpose")) != "batch":
        raise InvalidField("purpose", purpose, '"batch"; this server has no other use of files')
    if not 1 <= len(given.filename) <= MAX_NAME or "\0" in given.filename:
        raise InvalidField("file", given.filename, f"a file name of 1 to {MAX_NAME} characters")
    found = Files(ledger.store).create(
        given.content,
        tenant=request.caller.tenant,
        key_id=request.caller.key_id,
        filename=given.filename,
        now_ms=ledger.now_ms(),
        seconds=_seconds(given.fields),
        maximum=server.settings.max_file_storage,
    )
    return json_answer(found)


def _seconds(fields: dict[str, str]) -> int:
    """Return how long an uploaded file is kept. Raises ``InvalidField``."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return DEFAULT_SECONDS
    if anchor != ANCHOR:
        raise InvalidField("expires_after[anchor]", anchor, f'"{ANCHOR}"')
    if seconds is None or not (seconds.isascii() and seconds.isdigit()) or len(seconds) > 9:
        raise InvalidField("expires_after[seconds]", seconds, "seconds from 3600 (an hour) to 2592000 (30 days)")
    return check_seconds("expires_after[seconds]", int(seconds))


def list_files(server: WorkerState, request: Request) -> Answer:
    """Respond with a page of the caller's files."""
    given = parameters(request, LIST)
    limit = limit_of(given, MAX_LIST, MAX_LIST)
    found = Files(ledger_of(server).store).list(
        request.caller.tenant,
        purpose=given.get("purpose"),
        after=given.get("after"),
        limit=limit,
        descending=given.get("order", "desc") == "desc",
    )
    return json_answer(page_of(found, limit))


def show(server: WorkerState, request: Request) -> Answer:
    """Respond with a file's description."""
    return json_answer(Files(ledger_of(server).store).get(request.name, request.caller.tenant))


def delete(server: WorkerState, request: Request) -> Answer:
    """Delete a file."""
    Files(ledger_of(server).store).delete(request.name, request.caller.tenant)
    return json_answer({"id": request.name, "object": "file", "deleted": True})


def content(server: WorkerState, request: Request) -> Answer:
    """Respond with a file's content, read from the store as it is sent."""
    pieces = content_of(ledger_of(server).store, request.name, request.caller.tenant)
    return Answer(
        body=_sent(pieces, request),
        content_type="application/octet-stream",
        headers={"Cache-Control": "no-store", **request.record.headers},
    )


def _sent(pieces: Iterator[bytes], request: Request) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        gevent.sleep(0)


ROUTES = (
    route("POST", FILES, upload, "Upload a file of requests", FileObject, body=UPLOAD, content_types=(MULTIPART,)),
    route("GET", FILES, list_files, "List files", FileList, query=LIST),
    route("GET", ONE, show, "Show a file", FileObject),
    route("DELETE", ONE, delete, "Delete a file", DeletedFile),
    route("GET", f"{ONE}/content", content, "Download a file", None, produces=("application/octet-stream",)),
)
