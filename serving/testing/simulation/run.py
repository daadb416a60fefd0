"""Run many schedules, each in a few milliseconds, over one database."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from .database import Database
from .schedule import Outcome, Schedule

MEMORY = Path("/dev/shm")
"""A file system in memory, if the machine has one: nothing is meant to survive a run."""
COLLECT_EVERY = 100  # schedules: their actors and connections are in cycles


def outcomes(seeds: Iterable[int], trace: Callable[[str], object] | None = None) -> Iterator[Outcome]:
    """Run the schedule of each seed and yield what came of it."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as directory:
        root = Path(directory)
        database = Database(root)
        try:
            for number, seed in enumerate(seeds):
                yield Schedule(seed, database, root, trace).run()
                if number % COLLECT_EVERY == COLLECT_EVERY - 1:
                    gc.collect()
        finally:
            database.close()


def all_outcomes(seeds: Iterable[int]) -> list[Outcome]:
    """Return the outcome of each seed: the work of one process of several."""
    return list(outcomes(seeds))
