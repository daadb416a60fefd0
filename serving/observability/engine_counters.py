"""Sums of the counters of engine processes that never decrease from one scrape to the next.

An engine process counts from 0, and a worker only knows the processes that it was connected to, each with the counts of
the last heartbeat. If these counts were simply summed, the sum would fall whenever one of several processes ends or
restarts. Prometheus takes that for a counter reset and would count everything of the others again. So all workers
record their counts by engine process in one common file, which keeps the highest counts of each::

    engines.json    {endpoint: {served entity: {engine process: [count, …]}}}

An engine on this host keeps its counts in its own file instead (``serving.counts``). That file has everything the
process ever counted, up to the step in which it was killed, even if it only lived between two scrapes::

    engines/<key>/<engine process>    the counts, written by the engine
    places/<place>/<key>              the engines of an endpoint's served entity, including its former versions
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ..interface.engine import Health
from ..system.files import replace_file
from ..system.shared_counters import COUNTERS, read_counts
from .worker_counters import counters_locked

FILE = "engines.json"
MAX_ENGINES_KEPT = 256  # engine processes of an entity; the counts of those not seen for the longest time are added up
EARLIER = ""  # the key of that sum

Place = tuple[str, str]  # endpoint, served entity
_Known = dict[str, dict[str, dict[str, list[int]]]]


class CounterDirectory:
    """The files below ``directory`` in which one server's engines keep their counters."""

    def __init__(self, directory: Path) -> None:
        self._engines, self._places = directory / "engines", directory / "places"

    def root(self, key: str) -> str:
        """Return the directory in which the engines of ``key`` keep their counts."""
        root = self._engines / key
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        return str(root)

    def assign(self, place: Place, key: str) -> None:
        """Note that the engines of ``key`` serve ``place``."""
        named = self._places / _name(place) / key
        named.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        named.touch()

    def counts(self, place: Place) -> dict[str, tuple[int, ...]]:
        """Return the counts of every engine process that ever served ``place``, by generation."""
        named = self._places / _name(place)
        keys = sorted(os.listdir(named)) if named.is_dir() else []
        return {name: counts for key in keys for name, counts in read_counts(self._engines / key).items()}


def _name(place: Place) -> str:
    return hashlib.sha256("\n".join(place).encode()).hexdigest()


class EngineCounters:
    """The counters of all workers that share ``directory``; with None, only those of this object."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self.known: _Known = {}

    def merge(self, seen: Iterable[tuple[Place, Mapping[str, Health]]]) -> dict[Place, dict[str, int]]:
        """Merge the counts that this process has seen, by place and engine process, into those of all workers.

        Return the sums of ``COUNTERS`` for the same places, over everything that was ever seen. Raises
        ``FileNotFoundError`` if the directory is gone.
        """
        in_files = CounterDirectory(self._directory).counts if self._directory is not None else lambda _: {}
        found = [(place, health, in_files(place)) for place, health in seen]
        others = [(place, {n: h for n, h in health.items() if n not in own}) for place, health, own in found]
        if self._directory is None:
            _merge(self.known, others)
        else:
            with counters_locked(self._directory, exclusive=True):
                self.known = _read(self._directory / FILE)
                if _merge(self.known, others):
                    replace_file(self._directory / FILE, msgspec.json.encode(self.known))
        return {place: self._sums(place, own) for place, _, own in found}

    def _sums(self, place: Place, own: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        columns = zip(*self.known[place[0]][place[1]].values(), *own.values(), strict=True)
        return dict(zip(COUNTERS, map(sum, columns), strict=True))


def _merge(known: _Known, seen: Iterable[tuple[Place, Mapping[str, Health]]]) -> bool:
    """Merge ``seen`` into ``known``; return whether anything changed. Engines that were seen last come last."""
    new = False
    for (endpoint, entity), engines_seen in seen:
        engines = known.setdefault(endpoint, {}).setdefault(entity, {EARLIER: [0] * len(COUNTERS)})
        for generation, health in engines_seen.items():
            before = engines.pop(generation, None)
            found = [getattr(health, name) for name in COUNTERS]
            engines[generation] = found if before is None else [max(pair) for pair in zip(before, found, strict=True)]
            new = new or engines[generation] != before
        while len(engines) > MAX_ENGINES_KEPT + 1:
            oldest = next(generation for generation in engines if generation != EARLIER)
            engines[EARLIER] = [sum(pair) for pair in zip(engines[EARLIER], engines.pop(oldest), strict=True)]
    return new


def _read(path: Path) -> _Known:
    return msgspec.json.decode(path.read_bytes(), type=_Known) if path.exists() else {}
