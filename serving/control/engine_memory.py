"""Many models on one machine: which engines are loaded, within a memory budget.

An engine that is wanted and not loaded needs room. If the budget has none, idle engines are unloaded, the least
recently used one first; they are loaded again when a request wants them. An engine that is working, that was just asked
for, or that keeps a provisioned minimum is never unloaded: in that case the wanted engine waits.

An engine's size is measured once it is loaded (as the proportional set size, so that files mapped by several processes
count once); before that, it is estimated from its files.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil
from msgspec import Struct

from ..endpoints.config import EntityConfig, ModelSource
from ..interface.bundle import WEIGHTS
from ..interface.engine import EngineRecord
from ..interface.errors import PackagingError
from ..supervision.supervisor import EngineStatus

logger = logging.getLogger(__name__)

GRACE_SECONDS = 3.0  # seconds after its last use before an engine counts as idle: another request may be on its way
MEASURE_SECONDS = 5.0  # seconds
GIB = 2**30


class EngineUse(Struct, kw_only=True):
    """The known facts about an engine.

    ``size`` is in bytes, of one replica. ``unloaded`` is the reason why the engine is not loaded, "" if it is or never
    was. ``was_loaded`` says that an earlier controller process had it loaded, so that it may still be running."""

    name: str
    size: int
    measured: bool = False
    pinned: bool = False
    unloaded: str = ""
    unloads: int = 0
    was_loaded: bool = False
    start_seconds: float | None = None
    used_at: float = 0.0
    requested_at: float | None = None
    measured_at: float = -math.inf
    steps: int = -1
    claimed_at: float | None = None
    complained: bool = False

    def is_wanted(self, now: float) -> bool:
        """Return whether a request has asked for the engine within the last ``GRACE_SECONDS`` seconds."""
        return self.requested_at is not None and now - self.requested_at < GRACE_SECONDS

    def is_idle(self, now: float) -> bool:
        return now - self.used_at >= GRACE_SECONDS


class EngineMemory:
    """The part that decides which of the engines on this machine run. Used by one thread; times are ``time.monotonic``.

    ``budget`` is in bytes, None for no limit. ``measure(pid)`` returns bytes. ``known`` is what an earlier controller
    process has recorded."""

    def __init__(
        self,
        budget: int | None = None,
        *,
        measure: Callable[[int], int] | None = None,
        known: Mapping[str, EngineRecord] | None = None,
    ) -> None:
        self.budget = budget
        self._known = dict(known or {})
        self._measure = measure or proportional_set_size
        self._engines: dict[str, EngineUse] = {}
        self._warming: set[str] = set()

    def admit(self, key: str, entity: EntityConfig, endpoint: str) -> None:
        """Add an engine for an entity.

        Raises ``PackagingError`` if it can never be loaded: it is larger than the budget, or it is never unloaded and
        larger than what other such engines leave of the budget.
        """
        source = entity.model
        known = self._engines.get(key)
        if known is None:
            known = EngineUse(
                name=f"{endpoint}/{entity.name}", size=0 if entity.is_elsewhere else estimated_size(source)
            )
            if (record := self._known.get(key)) is not None and not entity.is_elsewhere:
                known.size, known.unloads = max(known.size, record.memory), record.unloads
                known.start_seconds, known.was_loaded = record.start_seconds, not record.unloaded
        pinned = known.pinned or bool(entity.min_provisioned_throughput)
        others = sum(one.size for other, one in self._engines.items() if one.pinned and other != key)
        self._check(known, pinned, others)
        known.pinned = pinned
        self._engines[key] = known
        self._warming.add(key)

    def check(self, key: str) -> None:
        """Check the engine against the budget once its size is measured. Raises ``PackagingError``."""
        known = self._engines[key]
        self._check(known, known.pinned, 0)

    def _check(self, known: EngineUse, pinned: bool, others: int) -> None:
        if self.budget is None:
            return
        how = "takes" if known.measured else "has files of"
        if known.size > self.budget:
            text = f"served entity {known.name} {how} {_gib(known.size)}, more than engine_memory_budget has: "
            raise PackagingError(text + _gib(self.budget))
        if pinned and known.size + others > self.budget:
            text = (
                f"served entity {known.name} {how} {_gib(known.size)} and is never unloaded (provisioned throughput);"
            )
            left = _gib(max(0, self.budget - others))
            raise PackagingError(f"{text} others like it leave {left} of engine_memory_budget")

    def is_known(self, key: str) -> bool:
        """Return whether the size of a ready engine is measured, or no budget makes that unnecessary."""
        return self.budget is None or self._engines[key].measured_at > -math.inf

    def pin(self, keys: Iterable[str]) -> None:
        """Note that exactly these engines keep a provisioned minimum."""
        pinned = set(keys)
        for key, one in self._engines.items():
            one.pinned = key in pinned

    def warmed(self, key: str) -> None:
        """Note that the engine has generated a token: from now on it may be unloaded."""
        self._warming.discard(key)

    def is_warming(self, key: str) -> bool:
        return key in self._warming

    def keep_only(self, keys: Iterable[str]) -> None:
        """Forget all other engines."""
        kept = set(keys)
        self._engines = {key: one for key, one in self._engines.items() if key in kept}
        self._warming &= kept

    def records(self) -> dict[str, EngineRecord]:
        """Return the records that workers show, by engine key."""
        return {
            key: EngineRecord(
                memory=one.size >> 20 << 20,
                measured=one.measured,
                start_seconds=one.start_seconds,
                unloaded=one.unloaded,
                unloads=one.unloads,
            )
            for key, one in self._engines.items()
        }

    def look(self, key: str, status: EngineStatus, requested_at: float | None, now: float) -> None:
        """Update what is known about an engine; ``requested_at`` is when a request last found it not loaded."""
        one = self._engines[key]
        health = [replica.health for replica in status.replicas]
        steps = sum(h.steps for h in health)
        if steps != one.steps or any(h.num_running or h.num_waiting for h in health):
            one.steps, one.used_at = steps, now
        if status.replicas and not status.ready:
            one.used_at = now  # it is starting, so something waits for it
        one.requested_at = requested_at
        if requested_at is not None:
            one.used_at = max(one.used_at, requested_at)
        one.start_seconds = status.start_seconds or one.start_seconds
        if status.ready and now - one.measured_at >= MEASURE_SECONDS and status.info is not None:
            one.measured_at = now
            pids = [replica.pid for replica in status.ready if replica.pid]
            sizes = [size for size in map(self._measure, pids) if size]
            if sizes:
                one.size, one.measured = max(sizes) * (1 + status.info.num_standbys), True

    def fit(self, wanted: Mapping[str, int], status: Mapping[str, EngineStatus], now: float) -> dict[str, int]:
        """Return how many of the wanted replicas each engine may have. Call ``look`` for every engine before."""
        decided = {key: number if self._is_due(key, now) else 0 for key, number in wanted.items()}
        for key in wanted:
            if not wanted[key] and status[key].wanted:
                self._unload(key, "no request came for it")
        if self.budget is not None:
            self._fit(decided, status, now, self.budget)
        for key, number in decided.items():
            if number:
                self._engines[key].unloaded = ""
        return decided

    def _is_due(self, key: str, now: float) -> bool:
        one = self._engines[key]
        return not one.unloaded or one.pinned or key in self._warming or one.is_wanted(now)

    def _fit(self, decided: dict[str, int], status: Mapping[str, EngineStatus], now: float, budget: int) -> None:
        """Make ``decided`` fit into ``budget``: idle engines are unloaded, and engines without room wait."""
        running = {key: min(number, status[key].wanted) for key, number in decided.items()}
        held = sum(self._engines[key].size * len(status[key].replicas) for key in decided)  # including draining ones
        kept = sum(self._engines[key].size * number for key, number in running.items())
        claims = [key for key, number in decided.items() if number > running[key]]
        for key, one in self._engines.items():
            one.claimed_at = (one.claimed_at or now) if key in claims else None
        idle = sorted(
            (key for key, number in running.items() if number and key not in claims and self._may_go(key, now)),
            key=lambda key: self._engines[key].used_at,
        )
        for key in sorted(claims, key=self._precedence):
            one = self._engines[key]
            need = one.size * (decided[key] - running[key])
            victims, freed = self._victims(idle, running, kept + need - budget)
            if kept + need - freed > budget:
                self._complain(key, f"{_gib(need)} are not free, and no other engine is idle")
                decided[key] = running[key]
                continue
            for victim in victims:
                idle.remove(victim)
                decided[victim] = 0
                self._unload(victim, f"its {_gib(self._engines[victim].size)} were needed for {one.name}")
            kept += need - freed
            present = {replica.index for replica in status[key].replicas}  # draining ones are revived, not started
            new = one.size * len(set(range(decided[key])) - present)
            if new and held + new > budget:  # wait until the unloaded engines have ended
                decided[key] = running[key]
            else:
                held += new
                one.complained = False
        victims, freed = self._victims(idle, running, kept - budget)
        for victim in victims if len([number for number in running.values() if number]) > 1 else ():
            decided[victim] = 0
            self._unload(victim, f"engines took more than engine_memory_budget has: {_gib(budget)}")

    def _precedence(self, key: str) -> tuple[bool, bool, float]:
        """Return the sort key of engines that want room: those that must run come first, then those that may still be
        running, then those that have waited longest."""
        one = self._engines[key]
        return (not one.pinned, not one.was_loaded, one.claimed_at or 0.0)

    def _may_go(self, key: str, now: float) -> bool:
        one = self._engines[key]
        return not one.pinned and key not in self._warming and bool(one.size) and one.is_idle(now)

    def _victims(self, idle: list[str], running: Mapping[str, int], missing: int) -> tuple[list[str], int]:
        """Return as many engines from the front of ``idle`` as free ``missing`` bytes, and the bytes that they free."""
        victims, freed = [], 0
        for key in idle:
            if freed >= missing:
                break
            victims.append(key)
            freed += self._engines[key].size * running[key]
        return victims, freed

    def _unload(self, key: str, why: str) -> None:
        one = self._engines[key]
        one.unloaded = why
        one.unloads += 1
        back = "" if one.start_seconds is None else f"; a request brings it back in about {one.start_seconds:.1f} s"
        logger.warning("unloaded %s (%s): %s%s", one.name, _gib(one.size), why, back)

    def _complain(self, key: str, why: str) -> None:
        one = self._engines[key]
        if not one.complained:
            one.complained = True
            logger.warning("%s waits to be loaded: %s", one.name, why)


def estimated_size(source: ModelSource) -> int:
    """Estimate an engine's size in bytes, from its weight files and the KV cache size in its settings."""
    root = Path(source.bundle.model_dir)
    files = [path for path in root.rglob("*") if path.suffix in WEIGHTS] if root.is_dir() else [root]
    return sum(path.stat().st_size for path in files if path.is_file()) + (source.engine.kv_cache_memory or 0)


def proportional_set_size(pid: int) -> int:
    """Return the size of a process in bytes, with shared memory counted proportionally; 0 if it has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
