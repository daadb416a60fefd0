"""Receipts of requests: the header that asks for one and carries it, and what is kept to prove an answer."""

from __future__ import annotations

from contextlib import suppress

from mlflow_llm import __version__

from ..interface.errors import Conflict, InvalidField, NotFound, Unavailable
from ..interface.request import ValidRequest
from ..metering.proof.answers import Asked, asked_of
from ..metering.proof.receipts import encode, receipt_of
from ..routing.served_endpoints import ServedEntity
from .operation import Request
from .worker_state import WorkerState

RECEIPT_HEADER = "x-mlflow-llm-receipt"
RECEIPT_PATH = "/api/2.0/receipts"
COMPUTED = ("backend", "device", "dtype", "quantization", "kernels", "instruction_set", "kv_cache_dtype", "threads")
"""Facts about an engine that can change the last bits of its results (``docs/determinism.md``)."""


def is_wanted(server: WorkerState, request: Request) -> bool:
    """Return whether the reply is to have a signed receipt. Raises ``InvalidField``."""
    given = request.headers.get(RECEIPT_HEADER)
    if given is None or given == "false":
        return False
    if given != "true":
        raise InvalidField(RECEIPT_HEADER, given, "true or false")
    if server.ledger is None:
        raise InvalidField(RECEIPT_HEADER, given, "false on a server without --database, which signs no receipts")
    return True


def name_place(request: Request, valid: ValidRequest) -> None:
    """Put the path of the receipt into the reply's header: those of a stream are sent before it is settled."""
    request.record.headers[RECEIPT_HEADER] = f"{RECEIPT_PATH}/{valid.request_id}"


def add(server: WorkerState, request: Request, valid: ValidRequest) -> None:
    """Put the receipt into the reply's header; where the store does not have the settlement yet, the path stays."""
    assert server.ledger is not None
    with suppress(Conflict, NotFound, Unavailable):
        request.record.headers[RECEIPT_HEADER] = encode(receipt_of(server.ledger.store, valid.request_id))


def asked(entity: ServedEntity, valid: ValidRequest, request: Request) -> Asked | None:
    """Return what repeats and proves the answer, kept with its row."""
    info = entity.engine.info
    computed = {name: str(getattr(info, name)) for name in COMPUTED} | {"release": __version__}
    record = request.record
    return asked_of(valid, route=record.path, body=record.body_digest, computed=computed)
