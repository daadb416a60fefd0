"""The counters of workers that have ended, added up in one file of each kind.

prometheus_client leaves a dead worker's files lying, for its counts must not be lost, and reads all of them at every
scrape. Here they are moved into ``<kind>_ended.db``, under a lock that scrapes share, so that no scrape sees them
twice or not at all.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict

from ..file_locks import locked
from .counter_file import CounterFile

LOCK = "figures.lock"
KINDS = ("counter", "histogram")


def counters_locked(directory: Path, *, exclusive: bool) -> AbstractContextManager[None]:
    """Hold the lock of the counters in ``directory``, for milliseconds: ``exclusive`` to move them, else to read them.

    Raises ``FileNotFoundError`` where the directory is gone: it goes with its server, which a worker may outlive.
    """
    return locked(directory / LOCK, exclusive=exclusive)


def merge_ended(directory: Path, pid: int) -> None:
    """Move the counters of the ended process ``pid`` to those of its predecessors.

    Does nothing where it left none, or where the server has ended.
    """
    with contextlib.suppress(FileNotFoundError), counters_locked(directory, exclusive=True):
        for kind in KINDS:
            path = directory / f"{kind}_{pid}.db"
            # without room for its counts scrapes go on reading them where they are
            if path.exists() and _add(path, directory / f"{kind}_ended.db"):
                path.unlink()


def _add(source: Path, target: Path) -> bool:
    """Whether there was room for it."""
    if not source.stat().st_size:
        return True  # nothing was ever counted
    into = CounterFile(os.fspath(target))
    try:
        found = list(MmapedDict.read_all_values_from_file(os.fspath(source)))  # type: ignore[no-untyped-call]
        if not into.has_room([key for key, *_ in found]):
            return False
        for key, value, timestamp, _ in found:
            before, _ = into.read_value(key)
            into.write_value(key, before + value, timestamp)
    finally:
        into.close()
    return True
