"""Settling, without a server, what ended processes left: what the next start would do. Safe beside running servers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from ..errors import AlreadyExists
from . import journals, recovery
from .identity import identify
from .owner import living_owners
from .silence import Silence
from .state import former, state_of
from .store import Store

WATCH_SECONDS = 10.0
"""For how long a process of another host is watched for a heartbeat: it writes one every two seconds."""


class Settled(Struct, frozen=True, kw_only=True):
    """``rows`` were closed. ``living`` are open in processes that live."""

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
    """Close the open rows of every process that has ended; those of living ones are left alone.

    ``moved``: what is left of the store that this one was a copy of is this one's. Raises ``AlreadyExists`` where a
    process of that store lives. ``watching`` is told how many processes of other hosts are watched for a while.
    """
    directory, count = state_of(store, root), 0
    if moved and (left := former(root, identify(store))) is not None:
        if living_owners(left):
            raise AlreadyExists("the database that this one was copied from is in use: it was not moved")
        count += _settle(store, left)
    count += _settle(store, directory)
    away = recovery.open_owners(store, directory)
    if away:
        watching(len(away))
        before = recovery.heartbeats(store, directory)
        wait(WATCH_SECONDS)
        now = recovery.heartbeats(store, directory)
        silent = [name for name in away if name in now and now[name] == before.get(name)]
        count += sum(recovery.recover_rows(store, name, _now_ms()) for name in silent)
    return Settled(rows=count, living=recovery.count_open(store))


def _settle(store: Store, directory: Path) -> int:
    settled = recovery.recover_local(store, directory, _now_ms(), Silence(float("inf")))
    while journals.collect(store, directory):
        pass
    return settled


def _now_ms() -> int:
    return int(time.time() * 1000)
