"""The counters of workers that have ended, added up in one file for each kind.

prometheus_client keeps a dead worker's files, since its counts must not be lost, and reads all of them at every scrape.
Here they are moved into ``<kind>_ended.db``, under a lock that scrapes share, so that every scrape sees them exactly
once.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict

from ..system.file_locks import locked
from .counter_file import CounterFile

LOCK = "figures.lock"
KINDS = ("counter", "histogram")


def counters_locked(directory: Path, *, exclusive: bool) -> AbstractContextManager[None]:
    """Hold the lock of the counters in ``directory`` for milliseconds: ``exclusive`` to move them, shared to read them.

    Raises ``FileNotFoundError`` if the directory is gone: it is removed with its server, which a worker may outlive.
    """
    return locked(directory / LOCK, exclusive=exclusive)


def merge_ended(directory: Path, pid: int) -> None:
    """Add the counters of the ended process ``pid`` to those of its predecessors.

    Does nothing if the process left none, or if the server has ended.
    """
    with contextlib.suppress(FileNotFoundError), counters_locked(directory, exclusive=True):
        for kind in KINDS:
            path = directory / f"{kind}_{pid}.db"
            # if there is no disk space for its counts, scrapes continue to read them from the old file
            if path.exists() and _add(path, directory / f"{kind}_ended.db"):
                path.unlink()


def _add(source: Path, target: Path) -> bool:
    """Add the counters in ``source`` to ``target``; return whether there was space for them."""
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
