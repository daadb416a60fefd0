"""A ledger's reservations and rows, and its process's end."""

from __future__ import annotations

from mlflow_llm.serving.metering.ledger.lease import Reservation
from mlflow_llm.serving.metering.ledger.ledger import Ledger
from mlflow_llm.serving.metering.usage.filter import UsageFilter
from mlflow_llm.serving.metering.usage.usage import Usage


def reservation(request_id: str, **changes: object) -> Reservation:
    fields: dict[str, object] = {
        "request_id": request_id,
        "key_id": "key_1",
        "tenant": "acme",
        "endpoint": "chat",
        "entity": "model-1",
        "mode": "pay_per_token",
        "task": "chat",
        "input_tokens": 10,
        "max_output_tokens": 20,
    }
    return Reservation(**(fields | changes))  # type: ignore[arg-type]


def rows_of(store):
    return {row.request_id: row for row in Usage(store).rows(UsageFilter())}


def die(ledger: Ledger) -> None:
    """Release the ledger's lock as the kernel does when a process dies, and leave everything else."""
    assert ledger._owner is not None
    ledger._owner.spool.close()
    ledger._owner.progress.close()
    ledger._owner._lock.give_away()
