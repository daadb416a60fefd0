"""``/v1/batches``: create, list, show and cancel batches."""

from __future__ import annotations

from typing import Any

from ...batches.batches import MAX_WINDOW_HOURS, Batches, window_seconds
from ...batches.files import DEFAULT_SECONDS
from ...batches.lines import ENDPOINTS
from ...batches.objects import BatchList, BatchObject, page_of
from ...frontend.answer import Answer, json_answer
from ...frontend.operation import Auth, Request, with_body
from ...frontend.worker_state import WorkerState
from ...interface.errors import InvalidField
from ...interface.labels import MAX_TAG_NAME, MAX_TAG_VALUE, MAX_TAGS
from ...interface.readers import Entry, one_of, reader, record, short_text, string
from ..route import Route
from .files import EXPIRES_AFTER
from .queries import DIALECT, PAGE, ledger_of, limit_of, parameters

BATCHES = "/v1/batches"
ONE = f"{BATCHES}/<name>"
_METADATA = f"at most {MAX_TAGS} pairs of texts, names of at most {MAX_TAG_NAME} characters, values of {MAX_TAG_VALUE}"


@reader(type="object", maxProperties=MAX_TAGS, additionalProperties={"type": "string", "maxLength": MAX_TAG_VALUE})
def _metadata(value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > MAX_TAGS:
        raise InvalidField(path, value, _METADATA)
    for name, entry in value.items():
        if not isinstance(entry, str) or len(name) > MAX_TAG_NAME or len(entry) > MAX_TAG_VALUE:
            raise InvalidField(f"{path}.{name[:MAX_TAG_NAME]}", entry, _METADATA)
        string(name, path)
        string(entry, f"{path}.{name}")
    return value


@reader(type="string", pattern="^[0-9]{1,3}h$")
def _window(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidField(path, value, f"hours such as 24h, from 1h to {MAX_WINDOW_HOURS}h")
    window_seconds(value)
    return value


NEW_BATCH = record(
    input_file_id=Entry(short_text(64), "A file with the purpose batch", required="the id of a file"),
    endpoint=Entry(one_of(*ENDPOINTS), "The route of all its requests", required="one of " + ", ".join(ENDPOINTS)),
    completion_window=Entry(_window, "After so many hours, what is not answered expires", required="hours such as 24h"),
    metadata=Entry(_metadata, "Your own labels"),
    output_expires_after=Entry(EXPIRES_AFTER, "How long its output and error files are kept (30 days)"),
)


def create(server: WorkerState, request: Request) -> Answer:
    """Create a batch. Raises ``InvalidField``, ``NotFound``, ``LimitExceeded``."""
    ledger = ledger_of(server)
    given = NEW_BATCH(request.json(), "")
    kept = given.get("output_expires_after", {"seconds": DEFAULT_SECONDS})["seconds"]
    found = Batches(ledger.store).create(
        request.caller,
        endpoint=given["endpoint"],
        input_file_id=given["input_file_id"],
        completion_window=given["completion_window"],
        metadata=given.get("metadata"),
        output_seconds=kept,
        now_ms=ledger.now_ms(),
        most_open=server.settings.max_open_batch_rows,
    )
    server.batches_changed.set()
    return json_answer(found)


def list_batches(server: WorkerState, request: Request) -> Answer:
    """Respond with a page of the caller's batches."""
    given = parameters(request, PAGE)
    limit = limit_of(given)
    found = Batches(ledger_of(server).store).list(request.caller.tenant, after=given.get("after"), limit=limit)
    return json_answer(page_of(found, limit))


def show(server: WorkerState, request: Request) -> Answer:
    """Respond with a batch."""
    return json_answer(Batches(ledger_of(server).store).get(request.name, request.caller.tenant))


def cancel(server: WorkerState, request: Request) -> Answer:
    """Cancel a batch."""
    ledger = ledger_of(server)
    found = Batches(ledger.store).cancel(request.name, request.caller.tenant, ledger.now_ms())
    server.batches_changed.set()
    return json_answer(found)


def _route(method: str, path: str, handler: Any, summary: str, reply: Any, **more: Any) -> Route:
    return Route(
        method=method,
        path=path,
        handler=with_body(handler),
        summary=summary,
        reply=reply,
        dialect=DIALECT,
        auth=Auth.INVOKE,
        **more,
    )


ROUTES = (
    _route(
        "POST",
        BATCHES,
        create,
        "Create a batch",
        BatchObject,
        body=NEW_BATCH,
        example={"input_file_id": "file-abc123", "endpoint": ENDPOINTS[0], "completion_window": "24h"},
    ),
    _route("GET", BATCHES, list_batches, "List batches", BatchList, query=PAGE),
    _route("GET", ONE, show, "Show a batch", BatchObject),
    _route("POST", f"{ONE}/cancel", cancel, "Cancel a batch", BatchObject),
)
