"""``/api/2.0/receipts/{name}``: signed receipts of requests, and the public key that verifies them.

A key gets the receipts of its own requests; with the scope "usage" those of its tenant; with "manage" all.
"""

from __future__ import annotations

from ...frontend.answer import Answer, json_answer
from ...frontend.operation import Auth, Request, with_body
from ...frontend.worker_state import WorkerState
from ...interface.errors import NotFound
from ...metering.ledger.ledger import Ledger
from ...metering.proof.receipts import Receipt, ReceiptKeys, public_keys, receipt_of
from ...metering.proof.recorded import request_of
from ..route import Route
from .paths import RECEIPT_KEYS, RECEIPTS


def get_receipt(server: WorkerState, request: Request) -> Answer:
    """Respond with the receipt of a settled request. Raises ``NotFound``, ``Conflict``."""
    caller, name = request.caller, request_of(request.name)
    if caller.manages:
        return json_answer(receipt_of(_ledger(server).store, name))
    own = None if "usage" in caller.scopes else caller.key_id
    return json_answer(receipt_of(_ledger(server).store, name, tenant=caller.tenant, caller=own))


def get_keys(server: WorkerState, request: Request) -> Answer:
    """Respond with the public keys. Raises ``NotFound`` without a ledger."""
    return json_answer(public_keys(_ledger(server).store))


def _ledger(server: WorkerState) -> Ledger:
    if server.ledger is None:
        raise NotFound("this server signs no receipts; start it with --database")
    return server.ledger


ROUTES = (
    Route(
        method="GET",
        path=RECEIPTS,
        handler=with_body(get_receipt),
        reply=Receipt,
        summary="The signed receipt of a request",
    ),
    Route(
        method="GET",
        path=RECEIPT_KEYS,
        handler=with_body(get_keys),
        reply=ReceiptKeys,
        summary="The public keys that verify receipts",
        auth=Auth.OPEN,
    ),
)
