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
            if path.exists():
                if path.stat().st_size:  # else it ended just when it had made the file
                    _add(path, directory / f"{kind}_ended.db")
                path.unlink()


def _add(source: Path, target: Path) -> None:
    into = MmapedDict(os.fspath(target))  # type: ignore[no-untyped-call]
    try:
        for key, value, timestamp, _ in MmapedDict.read_all_values_from_file(os.fspath(source)):  # type: ignore[no-untyped-call]
            before, _ = into.read_value(key)  # type: ignore[no-untyped-call]
            into.write_value(key, before + value, timestamp)  # type: ignore[no-untyped-call]
    finally:
        into.close()  # type: ignore[no-untyped-call]
