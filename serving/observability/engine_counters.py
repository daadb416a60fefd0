"""What engine processes have counted, added up so that no scrape shows less than the one before.

An engine process counts from 0, and a worker knows of those only that it was connected to, each as of its last
heartbeat. Were their counts summed as they are, the sum would fall whenever one of several ends or starts again, which
Prometheus takes for a new beginning: it would count once more all that the others had. So every worker notes what
it knows by engine process, and of each the highest counts stay, in one file of all workers::

    engines.json    {endpoint: {served entity: {engine process: [count, …]}}}

An engine of this host keeps its counts in a file of its own instead (``serving.counts``), which says all that it ever
counted, also of a process that came and went between two scrapes, up to the step in which it was killed::

    engines/<key>/<engine process>    the counts, written by the engine
    places/<place>/<key>              which engines are of an endpoint's served entity, its former versions included
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ..counts import COUNTERS, read_counts
from ..engine.interface import Health
from ..files import replace_file
from .worker_counters import counters_locked

FILE = "engines.json"
KEPT = 256  # engine processes of an entity; the counts of those not heard of for longest are added up
EARLIER = ""  # under which it is

Place = tuple[str, str]  # endpoint, served entity
_Known = dict[str, dict[str, dict[str, list[int]]]]


class CounterDirectory:
    """Below ``directory``, the files in which one server's engines keep their counters."""

    def __init__(self, directory: Path) -> None:
        self._engines, self._places = directory / "engines", directory / "places"

    def root(self, key: str) -> str:
        """Where the engines of ``key`` are to keep their counts."""
        root = self._engines / key
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        return str(root)

    def assign(self, place: Place, key: str) -> None:
        """Note that the engines of ``key`` serve ``place``."""
        named = self._places / _name(place) / key
        named.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        named.touch()

    def counts(self, place: Place) -> dict[str, tuple[int, ...]]:
        """Of every engine process that ever served ``place``, by generation."""
        named = self._places / _name(place)
        keys = sorted(os.listdir(named)) if named.is_dir() else []
        return {name: counts for key in keys for name, counts in read_counts(self._engines / key).items()}


def _name(place: Place) -> str:
    return hashlib.sha256("\n".join(place).encode()).hexdigest()


class EngineCounters:
    """The counters of all workers that have the same ``directory``, or for None of this object alone."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._known: _Known = {}

    def merge(self, seen: Iterable[tuple[Place, Mapping[str, Health]]]) -> dict[Place, dict[str, int]]:
        """Merge what this process has seen, by place and engine process, into what all have; the sums of ``COUNTERS``
        of the same places, over all that was ever seen.

        Raises ``FileNotFoundError`` where the directory is gone.
        """
        in_files = CounterDirectory(self._directory).counts if self._directory is not None else lambda _: {}
        found = [(place, health, in_files(place)) for place, health in seen]
        others = [(place, {n: h for n, h in health.items() if n not in own}) for place, health, own in found]
        if self._directory is None:
            _merge(self._known, others)
        else:
            with counters_locked(self._directory, exclusive=True):
                self._known = _read(self._directory / FILE)
                if _merge(self._known, others):
                    replace_file(self._directory / FILE, msgspec.json.encode(self._known))
        return {place: self._sums(place, own) for place, _, own in found}

    def _sums(self, place: Place, own: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        columns = zip(*self._known[place[0]][place[1]].values(), *own.values(), strict=True)
        return dict(zip(COUNTERS, map(sum, columns), strict=True))


def _merge(known: _Known, seen: Iterable[tuple[Place, Mapping[str, Health]]]) -> bool:
    """Merge ``seen`` into ``known``; whether there was anything new. Engines that were seen last stand last."""
    new = False
    for (endpoint, entity), engines_seen in seen:
        engines = known.setdefault(endpoint, {}).setdefault(entity, {EARLIER: [0] * len(COUNTERS)})
        for generation, health in engines_seen.items():
            before = engines.pop(generation, None)
            found = [getattr(health, name) for name in COUNTERS]
            engines[generation] = found if before is None else [max(pair) for pair in zip(before, found, strict=True)]
            new = new or engines[generation] != before
        while len(engines) > KEPT + 1:
            oldest = next(generation for generation in engines if generation != EARLIER)
            engines[EARLIER] = [sum(pair) for pair in zip(engines[EARLIER], engines.pop(oldest), strict=True)]
    return new


def _read(path: Path) -> _Known:
    return msgspec.json.decode(path.read_bytes(), type=_Known) if path.exists() else {}
