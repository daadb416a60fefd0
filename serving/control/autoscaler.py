"""How many replicas each served entity has, and how an entity is measured before it takes requests."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
from msgspec import Struct

from ..endpoints.config import EntityConfig
from ..interface.engine import Engine
from ..interface.errors import InvalidField
from ..metering.accounts.monotonic_clock import MonotonicClock
from ..metering.store.store import Store
from ..modes.billing import ReservedTime
from ..modes.calibration import Capacity, calibrate
from ..modes.provisioned import Measured, check_throughput, reserved_units
from ..supervision.supervisor import EngineStatus
from ..system.cpus import available_cpus
from .deployed import DeployedEntity
from .scaling import Load, ScalePolicy, ScaleState, decide
from .settings import ServerSettings

WANTED_SECONDS = 3.0  # how long a request for a replica counts; a waiting request repeats it every second
PREPARED_SECONDS = 120.0  # an entity that is not served within this time after its preparation never will be
SMOOTH_SECONDS = 5.0  # the time over which demand is averaged, since counters only come with heartbeats

_Place = tuple[str, int, str]


class _Counters(Struct, frozen=True):
    """Counters summed over all replicas, since their starts."""

    steps: int
    provisioned: int
    provisioned_prompt: int

    @classmethod
    def of(cls, status: EngineStatus) -> _Counters:
        health = [replica.health for replica in status.replicas]
        return cls(
            sum(h.steps for h in health),
            sum(h.provisioned_tokens for h in health),
            sum(h.provisioned_prompt_tokens for h in health),
        )


class _Seen(Struct):
    """An entity's scaling state, its counters at the last step and when that was, and its recent tokens/s."""

    state: ScaleState
    at: float
    counters: _Counters
    rate: float = 0.0


class Autoscaler:
    """The part that decides how many replicas the served entities have, in the controller process.

    An entity without provisioned throughput has one replica, or none if it is idle and may scale to zero. An entity
    whose engines run on other hosts has one replica for each of them.

    If ``reserved_time`` is None, there is no ledger and nothing can be reserved. An entity that may scale to zero does
    so after ``idle_seconds`` without a request.
    """

    @classmethod
    def of(cls, settings: ServerSettings, store: Store) -> Autoscaler:
        """Return the autoscaler of a server. A server without a database has no ledger."""
        reserved_time = ReservedTime(store, now=MonotonicClock().now) if settings.database is not None else None
        return cls(reserved_time, idle_seconds=settings.scale_to_zero_after)

    def __init__(
        self, reserved_time: ReservedTime | None = None, *, idle_seconds: float = 300.0, settle_seconds: float = 60.0
    ) -> None:
        self._reserved_time = reserved_time
        self._idle_seconds, self._settle_seconds = idle_seconds, settle_seconds
        self._capacity: dict[str, Capacity] = {}  # by engine key
        self._shares: dict[_Place, tuple[float, float]] = {}  # (reserved share of the machine, when it was reserved)
        self._seen: dict[_Place, _Seen] = {}
        self._lock = threading.Lock()

    def prepare(self, entity: DeployedEntity, engine: Engine) -> dict[str, Any]:
        """Measure an entity whose engine is ready, and return the facts that every worker gets.

        Raises ``InvalidField`` to refuse the entity. Runs on a separate thread, one entity at a time, and takes some
        seconds the first time for an engine.
        """
        if not entity.config.provisioned:
            return {}
        field, given = entity.config.reserve
        if self._reserved_time is None:
            raise InvalidField(field, given, "none on a server started without --database")
        if not engine.info.capabilities.provisioned:
            raise InvalidField(field, given, f"none of an engine of backend {engine.info.backend!r}")
        if (capacity := self._capacity.get(entity.key)) is None:
            capacity = self._capacity[entity.key] = calibrate(engine)
        replica_limit = replicas_on_this_machine(entity.config)
        self._reserve(entity, capacity, replica_limit)
        measured = Measured(
            tokens_per_second=capacity.decode_tokens_per_second,
            prompt_weight_milli=capacity.prompt_weight_milli,
            replica_limit=replica_limit,
        )
        facts: dict[str, Any] = msgspec.to_builtins(measured)
        return facts

    def step(
        self,
        entity: DeployedEntity,
        facts: dict[str, Any],
        status: EngineStatus,
        requested_at: float | None,
        now: float,
    ) -> int:
        """Observe an entity, bill its reserved throughput, and return how many replicas it should have.

        Call this about every second. ``requested_at`` is when a request last found no replica; both times are
        ``time.monotonic``.
        """
        measured = msgspec.convert(facts, Measured) if facts else None
        policy = self._policy(entity.config, measured)
        if policy is None:
            return max(1, len(entity.config.model.addresses))
        place = _place(entity)
        if (seen := self._seen.get(place)) is None:
            state = ScaleState(replicas=max(status.wanted, 1))
            seen = self._seen[place] = _Seen(state, now, _Counters.of(status))
            with self._lock:
                self._shares[place] = (policy.min_throughput / (policy.per_replica * policy.replica_limit), now)
        if measured is not None:
            self._bill(entity, policy, status)
        load = _observe(seen, measured, status, requested_at, now)
        seen.state = decide(policy, seen.state, load, now)
        return seen.state.replicas

    def forget(self, entity: DeployedEntity) -> None:
        """Drop the state of an entity that is no longer served."""
        self._seen.pop(_place(entity), None)
        with self._lock:
            self._shares.pop(_place(entity), None)
        if self._reserved_time is not None:
            self._reserved_time.forget(entity.endpoint, entity.config.name)

    def _reserve(self, entity: DeployedEntity, capacity: Capacity, replica_limit: int) -> None:
        """Reserve the share of the machine that the minimum needs. Raises ``InvalidField`` if too little is left.

        Other versions of the same endpoint do not count, since this version replaces them.
        """
        minimum, maximum = entity.config.min_provisioned_throughput or 0, entity.config.max_provisioned_throughput or 0
        check_throughput(minimum, maximum, capacity, max_replicas=replica_limit)
        share = minimum / (capacity.decode_tokens_per_second * replica_limit)
        with self._lock:
            taken = sum(
                other
                for place, (other, at) in self._shares.items()
                if (place[0] != entity.endpoint or place[1] == entity.version)
                and (place in self._seen or time.monotonic() - at < PREPARED_SECONDS)
            )
            if taken + share > 1.0:
                left = max(0, int((1.0 - taken) * capacity.decode_tokens_per_second * replica_limit))
                allowed = f"at most {left} tokens/s: what other endpoints leave of this machine's capacity"
                raise InvalidField("min_provisioned_throughput", minimum, allowed)
            self._shares[_place(entity)] = (share, time.monotonic())

    def _policy(self, config: EntityConfig, measured: Measured | None) -> ScalePolicy | None:
        """Return the limits of an entity's scaling, or None if there is nothing to decide."""
        if measured is None and not config.scale_to_zero_enabled:
            return None
        return ScalePolicy(
            per_replica=measured.tokens_per_second if measured is not None else 1,
            min_throughput=(config.min_provisioned_throughput or 0) if measured is not None else 0,
            max_throughput=(config.max_provisioned_throughput or 0) if measured is not None else 1,
            replica_limit=measured.replica_limit if measured is not None else 1,
            scale_to_zero=config.scale_to_zero_enabled,
            settle_seconds=self._settle_seconds,
            idle_seconds=self._idle_seconds,
        )

    def _bill(self, entity: DeployedEntity, policy: ScalePolicy, status: EngineStatus) -> None:
        if self._reserved_time is not None:
            running = min(len(status.ready), policy.max_replicas)  # another endpoint may keep more of this engine
            units = reserved_units(policy.per_replica, policy.max_throughput, running)
            self._reserved_time.hold(entity.endpoint, entity.config.name, units, entity.config.asked)


def replicas_on_this_machine(config: EntityConfig) -> int:
    """Return how many replicas can have separate CPUs: an engine that uses all of them allows only one."""
    threads = config.model.engine.threads
    if not threads:
        return 1
    found = available_cpus()
    there = found.allowed if found.quota is None else min(found.allowed, found.quota)
    return max(1, int(there // threads))


def _place(entity: DeployedEntity) -> _Place:
    return (entity.endpoint, entity.version, entity.config.name)


def _observe(
    seen: _Seen, measured: Measured | None, status: EngineStatus, requested_at: float | None, now: float
) -> Load:
    """Update ``seen`` with the counters and return the load.

    The demand is the provisioned throughput in use; any kind of request keeps an entity from being idle.
    """
    counters, before, seconds = _Counters.of(status), seen.counters, max(now - seen.at, 0.05)
    used = 0.0
    if measured is not None:
        prompt = max(0, counters.provisioned_prompt - before.provisioned_prompt)
        used = max(0, counters.provisioned - before.provisioned) + prompt * measured.prompt_weight_milli / 1000
    seen.rate += (used / seconds - seen.rate) * min(1.0, seconds / SMOOTH_SECONDS)
    seen.counters, seen.at = counters, now
    health = [replica.health for replica in status.replicas]
    running = sum(h.num_running + h.num_waiting for h in health) + (counters.steps != before.steps)
    cold = not status.ready and requested_at is not None and now - requested_at < WANTED_SECONDS
    return Load(
        tokens_per_second=seen.rate if running else 0.0,
        waiting=int(cold and seen.state.replicas == 0),
        running=running + cold,
    )
