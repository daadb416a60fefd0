"""Settling what ended processes left open, each request by the best record there is of it.

In this order: the owner's spool (exact), its progress file (exact up to the kill), the row's own checkpoint (for a
host that went away with its disk: at most one heartbeat old).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import sqlalchemy as sa

from ..progress import read_progress
from .lease import Lease
from .owner import STALE_SECONDS, DeadOwner, dead_owners, is_local
from .settlement import Settlement, settle_in
from .spool import drain_file, spooled
from .store import Store
from .tables import ledger, owners


def heartbeat(store: Store, owner: str, now_ms: int, open_leases: Iterable[Lease]) -> None:
    """Say that ``owner`` lives, and write into its open rows what they have used so far."""
    checkpoints = [
        {
            "id": lease.request_id,
            "prompt_tokens": lease.prompt_tokens,
            "cached_tokens": lease.cached_tokens,
            "completion_tokens": lease.completion_tokens,
        }
        for lease in open_leases
        if lease.prompt_tokens or lease.completion_tokens
    ]
    still_open = sa.update(ledger).where(ledger.c.request_id == sa.bindparam("id"), ledger.c.status == "open")
    statement = still_open.values({name: sa.bindparam(name) for name in _COUNTS})

    def work(connection: sa.Connection) -> None:
        insert = store.insert(owners).values(owner=owner, heartbeat_ms=now_ms)
        connection.execute(insert.on_conflict_do_update(index_elements=["owner"], set_={"heartbeat_ms": now_ms}))
        if checkpoints:
            connection.execute(statement, sorted(checkpoints, key=lambda row: str(row["id"])))

    store.write(work, timeout=2.0)


_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")


def recover(store: Store, state_dir: Path, now_ms: int) -> int:
    """Rows settled. Interrupted anywhere, it is simply done again: no step changes a row twice."""
    found = dead_owners(state_dir)
    try:
        settled = sum(_recover_local(store, owner, now_ms) for owner in found)
    finally:
        for owner in found:
            owner.release()
    return settled + sum(_recover_rows(store, name, now_ms) for name in _silent_owners(store, state_dir, now_ms))


def _recover_local(store: Store, owner: DeadOwner, now_ms: int) -> int:
    settled = sum(drain_file(path, lambda s: settle_in(store, s)) for path in spooled(owner.directory))
    for seen in read_progress(owner.directory / "progress"):
        settlement = settlement_of(seen.request_id, now_ms, seen.prompt, seen.cached, seen.completion)
        settled += settle_in(store, settlement)
    settled += _recover_rows(store, owner.name, now_ms)
    owner.remove()
    return settled


def _recover_rows(store: Store, owner: str, now_ms: int) -> int:
    """Settle the open rows of ``owner`` by their checkpoint, then forget it."""
    query = sa.select(ledger.c.request_id, *(ledger.c[name] for name in _COUNTS))
    query = query.where(ledger.c.owner == owner, ledger.c.status == "open")
    settled = 0
    for request_id, prompt, cached, completion in store.read(lambda connection: connection.execute(query).all()):
        settled += settle_in(store, settlement_of(request_id, now_ms, prompt, cached, completion))
    store.write(lambda connection: connection.execute(sa.delete(owners).where(owners.c.owner == owner)))
    return settled


def settlement_of(request_id: str, now_ms: int, prompt: int = 0, cached: int = 0, completion: int = 0) -> Settlement:
    """Of a request whose process cannot say more of it."""
    return Settlement(
        request_id=request_id,
        prompt=prompt,
        cached=cached,
        completion=completion,
        finish_reason="abort",
        status="recovered",
        ended_ms=now_ms,
    )


def open_rows(store: Store, owner: str, before_ms: int) -> list[str]:
    """Request ids of the rows that ``owner`` opened before ``before_ms`` and that are still open."""
    query = sa.select(ledger.c.request_id).where(ledger.c.owner == owner, ledger.c.status == "open")
    query = query.where(ledger.c.started_ms < before_ms)
    return store.read(lambda connection: list(connection.execute(query).scalars()))


def _silent_owners(store: Store, state_dir: Path, now_ms: int) -> list[str]:
    """Owners of other hosts (or of a lost state directory) without a heartbeat for ``STALE_SECONDS``."""
    stale_ms = now_ms - int(STALE_SECONDS * 1000)
    silent = sa.select(owners.c.owner).where(owners.c.heartbeat_ms < stale_ms)
    never_seen = (
        sa.select(ledger.c.owner)
        .where(ledger.c.status == "open", ledger.c.started_ms < stale_ms)
        .where(ledger.c.owner.not_in(sa.select(owners.c.owner)))
        .distinct()
    )
    names = store.read(
        lambda connection: [*connection.execute(silent).scalars(), *connection.execute(never_seen).scalars()]
    )
    return [name for name in names if not is_local(state_dir, name)]
