"""Crash recovery: settle the open leases of ended processes, each by the best record that there is of it.

The records, in order of preference: the owner's spool (exact), its progress file (exact up to the kill), and the row's
own checkpoint (if a host was lost together with its disk; at most one heartbeat old). A host that comes back after its
rows were settled by their checkpoints corrects them by its spools and progress files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

import sqlalchemy as sa

from ...system.progress import read_progress
from ..store.staleness import StalenessDetector
from ..store.store import Store
from ..store.tables import ledger, owners
from .lease import Lease
from .lease_owner import STALE_SECONDS, DeadOwner, is_local, remove_unfinished, take_over_dead
from .settlement import Settlement, settle_in
from .spool import drain_file, spooled

Settled: TypeAlias = Callable[[str], object]
"""It is called with the id of each request that was settled."""


def ignore(_request_id: str) -> None:
    """Do nothing with the id of a request that was settled."""


def heartbeat(store: Store, owner: str, now_ms: int, open_leases: Iterable[Lease]) -> None:
    """Write the heartbeat of ``owner``, and checkpoint its open rows with their usage so far."""
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


class Recovery:
    """Crash recovery of one store; ``state_dir`` is that of its processes on this host. Not thread-safe.

    A process of this host is alive as long as its lock is held. A process of another host (or with a state directory
    that is gone) is alive as long as its heartbeat changes, by this process's monotonic clock: no wall clock decides.
    """

    def __init__(
        self, store: Store, state_dir: Path, *, monotonic: Callable[[], float], settled: Settled = ignore
    ) -> None:
        self._store, self._state_dir, self._settled = store, state_dir, settled
        self._beats = StalenessDetector(STALE_SECONDS, monotonic=monotonic)
        self._unfinished = StalenessDetector(STALE_SECONDS, monotonic=monotonic)

    def run(self, now_ms: int) -> int:
        """Settle the rows of ended processes and return how many. Idempotent: it can be interrupted and repeated."""
        count = recover_local(self._store, self._state_dir, now_ms, self._unfinished, self._settled)
        silent = self._beats.observe(heartbeats(self._store, self._state_dir))
        return count + sum(recover_rows(self._store, name, now_ms, self._settled) for name in silent)


def recover_local(
    store: Store, state_dir: Path, now_ms: int, unfinished: StalenessDetector, settled: Settled = ignore
) -> int:
    """Settle the rows of this host's ended processes and return how many."""
    remove_unfinished(state_dir, unfinished)
    found = take_over_dead(state_dir)
    try:
        return sum(_recover_owner(store, owner, now_ms, settled) for owner in found)
    finally:
        for owner in found:
            owner.release()


def open_owners(store: Store, state_dir: Path) -> list[str]:
    """Return the owners that have open rows but no directory here."""
    return [name for name in store.read(_open_owners) if not is_local(state_dir, name)]


def _open_owners(connection: sa.Connection) -> list[str]:
    query = sa.select(ledger.c.owner).where(ledger.c.status == "open").distinct()
    return list(connection.execute(query).scalars())


def heartbeats(store: Store, state_dir: Path) -> dict[str, int | None]:
    """Return the last heartbeat (ms) of every owner without a directory here; None for open rows without heartbeat."""

    def work(connection: sa.Connection) -> dict[str, int | None]:
        found: dict[str, int | None] = dict.fromkeys(_open_owners(connection))
        for name, beat in connection.execute(sa.select(owners.c.owner, owners.c.heartbeat_ms)):
            found[name] = beat
        return found

    return {name: beat for name, beat in store.read(work).items() if not is_local(state_dir, name)}


def _recover_owner(store: Store, owner: DeadOwner, now_ms: int, settled: Settled) -> int:
    count = sum(drain_file(path, lambda s: _settle(store, s, settled)) for path in spooled(owner.directory))
    for seen in read_progress(owner.directory / "progress"):
        settlement = settlement_of(seen.request_id, now_ms, seen.prompt, seen.cached, seen.completion)
        count += _settle(store, settlement, settled)
    count += recover_rows(store, owner.name, now_ms, settled)
    owner.remove()
    return count


def _settle(store: Store, settlement: Settlement, settled: Settled) -> bool:
    if done := settle_in(store, settlement):
        settled(settlement.request_id)
    return done


def recover_rows(store: Store, owner: str, now_ms: int, settled: Settled = ignore) -> int:
    """Settle the open rows of ``owner`` by their checkpoints, forget the owner, and return how many rows."""
    query = sa.select(ledger.c.request_id, *(ledger.c[name] for name in _COUNTS))
    query = query.where(ledger.c.owner == owner, ledger.c.status == "open")
    count = 0
    for request_id, prompt, cached, completion in store.read(lambda connection: connection.execute(query).all()):
        count += _settle(store, settlement_of(request_id, now_ms, prompt, cached, completion), settled)
    store.write(lambda connection: connection.execute(sa.delete(owners).where(owners.c.owner == owner)))
    return count


def settlement_of(request_id: str, now_ms: int, prompt: int = 0, cached: int = 0, completion: int = 0) -> Settlement:
    """Return the settlement of a request whose process has ended, with the counts known."""
    return Settlement(
        request_id=request_id,
        prompt=prompt,
        cached=cached,
        completion=completion,
        finish_reason="abort",
        status="recovered",
        ended_ms=now_ms,
    )


def count_open(store: Store) -> int:
    """Count the open rows of all owners."""
    query = sa.select(sa.func.count()).select_from(ledger).where(ledger.c.status == "open")
    return store.read(lambda connection: connection.execute(query).scalar_one())


def open_rows(store: Store, owner: str) -> list[str]:
    """Return the request ids of the open rows of ``owner``."""
    query = sa.select(ledger.c.request_id).where(ledger.c.owner == owner, ledger.c.status == "open")
    return store.read(lambda connection: list(connection.execute(query).scalars()))
