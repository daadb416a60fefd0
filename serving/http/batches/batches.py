"""``/v1/batches``: create, list, show and cancel batches."""

from __future__ import annotations

from typing import Any

from ...batches.batches import MAX_WINDOW_HOURS, Batches, window_seconds
from ...batches.files import DEFAULT_SECONDS
from ...batches.lines import ENDPOINTS
from ...batches.objects import BatchList, BatchObject, page_of
from ...dialects.fields.label_fields import label, tags
from ...frontend.answer import Answer, json_answer
from ...frontend.operation import Request
from ...frontend.worker_state import WorkerState
from ...interface.errors import InvalidField
from ...interface.readers import Entry, one_of, reader, record
from ..query_parameters import limit_of, parameters
from .files import EXPIRES_AFTER
from .queries import DEFAULT_LIMIT, MAX_LIMIT, PAGE, ledger_of, route

BATCHES = "/v1/batches"
ONE = f"{BATCHES}/<name>"


@reader(type="string", pattern="^[0-9]{1,3}h$")
def _window(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidField(path, value, f"hours such as 24h, from 1h to {MAX_WINDOW_HOURS}h")
    window_seconds(value)
    return value


NEW_BATCH = record(
    input_file_id=Entry(label(1, 64), "A file with the purpose batch", required="the id of a file"),
    endpoint=Entry(one_of(*ENDPOINTS), "The route of all its requests", required="one of " + ", ".join(ENDPOINTS)),
    completion_window=Entry(_window, "After so many hours, what is not answered expires", required="hours such as 24h"),
    metadata=Entry(tags, "Your own labels"),
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
        max_open=server.settings.max_open_batch_rows,
    )
    server.batches_changed.set()
    return json_answer(found)


def list_batches(server: WorkerState, request: Request) -> Answer:
    """Respond with a page of the caller's batches."""
    given = parameters(request, PAGE)
    limit = limit_of(given, MAX_LIMIT, DEFAULT_LIMIT)
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


ROUTES = (
    route(
        "POST",
        BATCHES,
        create,
        "Create a batch",
        BatchObject,
        body=NEW_BATCH,
        example={"input_file_id": "file-abc123", "endpoint": ENDPOINTS[0], "completion_window": "24h"},
    ),
    route("GET", BATCHES, list_batches, "List batches", BatchList, query=PAGE),
    route("GET", ONE, show, "Show a batch", BatchObject),
    route("POST", f"{ONE}/cancel", cancel, "Cancel a batch", BatchObject),
)
