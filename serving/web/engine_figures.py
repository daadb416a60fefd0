"""What engine processes have counted, added up so that no scrape shows less than the one before.

An engine process counts from 0, and a worker knows of those only that it was connected to, each as of its last
heartbeat. Were their counts summed as they are, the sum would fall whenever one of several ends or starts again, which
Prometheus takes for a new beginning: it would count once more all that the others had. So every worker tells what it
knows by engine process, and of each the highest figures stay, in one file of all workers::

    engines.json    {endpoint: {served entity: {engine process: [figure, …]}}}
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ..engine.interface import Engine, Health
from .worker_figures import locked

FILE = "engines.json"
COUNTERS = ("steps", "prefix_hit_tokens", "prefix_query_tokens", "generated_tokens")
KEPT = 256  # engine processes of an entity; what longer nobody has told of is added up
EARLIER = ""  # under which it is

Place = tuple[str, str]  # endpoint, served entity
_Known = dict[str, dict[str, dict[str, list[int]]]]


def figures_of(engine: Engine, name: str = "engine") -> Mapping[str, Health]:
    """The last figures of each engine process behind ``engine``, by generation; one without has ``name``."""
    figures = getattr(engine, "figures", None)
    return figures() if figures is not None else {name: engine.health()}


class Tally:
    """Of all workers that have the same ``directory``, or for None of this object alone."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._known: _Known = {}

    def add(self, told: Iterable[tuple[Place, Mapping[str, Health]]]) -> dict[Place, dict[str, int]]:
        """Take what this process knows; the sums of ``COUNTERS`` of the same places, over all that was ever told.

        Raises ``FileNotFoundError`` where the directory is gone.
        """
        told = list(told)
        if self._directory is None:
            _take(self._known, told)
        else:
            with locked(self._directory, alone=True):
                self._known = _read(self._directory / FILE)
                if _take(self._known, told):
                    _write(self._directory / FILE, self._known)
        return {place: self._sums(*place) for place, _ in told}

    def _sums(self, endpoint: str, entity: str) -> dict[str, int]:
        columns = zip(*self._known[endpoint][entity].values(), strict=True)
        return dict(zip(COUNTERS, map(sum, columns), strict=True))


def _take(known: _Known, told: Iterable[tuple[Place, Mapping[str, Health]]]) -> bool:
    """Whether there was anything new. Those that were told of last stand last."""
    new = False
    for (endpoint, entity), figures in told:
        engines = known.setdefault(endpoint, {}).setdefault(entity, {EARLIER: [0] * len(COUNTERS)})
        for generation, health in figures.items():
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


def _write(path: Path, known: _Known) -> None:
    """At once or not at all: its writer may be killed under way."""
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(known))
    os.replace(part, path)
