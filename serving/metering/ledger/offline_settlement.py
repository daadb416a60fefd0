"""Offline settlement: close the leases of ended processes without a server. Safe beside running servers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from ...interface.errors import AlreadyExists
from ..proof.chain import extend
from ..store.identity import ensure_identity
from ..store.staleness import StalenessDetector
from ..store.store import Store
from . import crash_recovery, engine_journals
from .lease_owner import living_owners
from .store_directory import former_directory, open_directory

WATCH_SECONDS = 10.0
"""For how long a process of another host is watched for a heartbeat: it writes one every two seconds."""


class Settled(Struct, frozen=True, kw_only=True):
    """The number of ``rows`` that were closed, and of open rows of ``living`` processes."""

    rows: int
    living: int


def settle_ended(
    store: Store,
    root: Path,
    *,
    moved: bool = False,
    watching: Callable[[int], object] = lambda count: None,
    wait: Callable[[float], object] = time.sleep,
) -> Settled:
    """Close the open rows of every process that has ended.

    With ``moved``, also take over the files of the store that this one was copied from; raises ``AlreadyExists`` if a
    process of that store is alive. ``watching`` is called with the number of processes on other hosts that are watched
    for ``WATCH_SECONDS``.
    """
    directory, count = open_directory(store, root), 0
    if moved and (left := former_directory(root, ensure_identity(store))) is not None:
        if living_owners(left):
            raise AlreadyExists("the database that this one was copied from is in use: it was not moved")
        count += _settle(store, left)
    count += _settle(store, directory)
    away = crash_recovery.open_owners(store, directory)
    if away:
        watching(len(away))
        before = crash_recovery.heartbeats(store, directory)
        wait(WATCH_SECONDS)
        now = crash_recovery.heartbeats(store, directory)
        silent = [name for name in away if name in now and now[name] == before.get(name)]
        count += sum(crash_recovery.recover_rows(store, name, _now_ms()) for name in silent)
    while extend(store, _now_ms(), wait=True):
        pass
    return Settled(rows=count, living=crash_recovery.count_open(store))


def _settle(store: Store, directory: Path) -> int:
    settled = crash_recovery.recover_local(store, directory, _now_ms(), StalenessDetector(float("inf")))
    while engine_journals.collect(store, directory):
        pass
    return settled


def _now_ms() -> int:
    return int(time.time() * 1000)
