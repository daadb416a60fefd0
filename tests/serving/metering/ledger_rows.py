"""A ledger's reservations and rows, and the ends and faults that no call of a ledger brings about.

A process that is killed, an admission that ends inside its transaction, old pages of a file after a power cut and a
store that has just been slow happen to a ledger from outside. Only these functions touch its private parts for that.
"""

from __future__ import annotations

from mlflow_llm.serving.metering.ledger.lease import Lease, Reservation
from mlflow_llm.serving.metering.ledger.lease_owner import LeaseOwner
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
    owner = owner_of(ledger)
    owner.spool.close()
    owner.progress.close()
    owner._lock.give_away()


def bury(ledger: Ledger) -> None:
    """End the process as ``die`` does, and leave the object nothing to close."""
    die(ledger)
    ledger._owner = None


def owner_of(ledger: Ledger) -> LeaseOwner:
    """Return the owner, whose spool and progress file are what a full disk refuses and a dead process leaves."""
    assert ledger._owner is not None
    return ledger._owner


def forget(ledger: Ledger, request_id: str) -> None:
    """Forget a lease, as if its admission had ended inside its transaction."""
    del ledger._open[request_id]


def write_old_counts(ledger: Ledger, lease: Lease, *, completion: int) -> None:
    """Write smaller counts of a lease to the progress file, as the old pages that a power cut leaves."""
    owner_of(ledger).progress.put(lease._slot, lease.prompt_tokens, lease.cached_tokens, completion)


def spool_settlements(ledger: Ledger, *, on: bool = True) -> None:
    """Spool settlements from now on without asking the store, as after a slow one; not ``on``: ask it again."""
    ledger._spooling_until = float("inf") if on else 0.0


def end_breaker(ledger: Ledger) -> None:
    """Close the ledger's circuit breaker, as the passing of its time would."""
    ledger._refusing_until = ledger._spooling_until = 0.0


def undo_admission(ledger: Ledger, request_id: str, nonce: str) -> None:
    """Undo an admission whose commit was not answered."""
    ledger._undo(owner_of(ledger), request_id, nonce)
