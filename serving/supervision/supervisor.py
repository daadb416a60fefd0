"""The one place that starts a server's engine processes and keeps them: any number of replicas of any number of models.

::

    starting ──► ready ──► starting        died or hung: restarted
       │  ▲
       ▼  │ after a pause, longer each time
      failed                               ``ReplicaStatus.message`` says why; it stays so until a start succeeds
    any ──► draining ──► gone              fewer replicas, or the entity removed
            draining ──► starting          more replicas again before it is gone

An entity is a served model under a name that the caller chooses; its replicas are numbered from 0. After each start, a
replica is only ready when its engine has passed ``probe`` (it generated a token). A draining replica is kept running
until ``in_use(address)`` is false, so that no request on it is lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import msgspec
from msgspec import Struct

from ..interface.engine import Engine, EngineInfo, Health
from ..interface.errors import Conflict, InvalidField, NotFound, PackagingError
from ..system.load_steps import LoadStep
from ..transport.client.client import RemoteEngine
from ..transport.discovery.state_directory import StateDirectory
from .adapter_sync import NO_ADAPTERS, AdapterSync, WantedAdapters
from .engine_spec import EngineSpec
from .replica import Replica, ReplicaState

MAX_REPLICAS = 64
ALIKE = ("dtype", "quantization", "max_model_len")


class ReplicaStatus(Struct, frozen=True, kw_only=True):
    """The status of a replica.

    ``address`` is what ``attach`` takes, ``message`` the last failure, and ``failed_log`` the log of the engine that
    failed. ``restarts`` counts the starts after the first; ``was_ready`` says that it has been ready at some time.
    ``adapters`` has the revision that it has of each wanted adapter, ``refused_adapters`` the revision that it refused,
    and why. ``pid`` is that of the engine process, if that is on this host. ``is_draining`` says that it is not wanted
    any more."""

    index: int
    address: str
    state: ReplicaState
    health: Health
    restarts: int = 0
    message: str = ""
    was_ready: bool = False
    failed_log: str = ""
    adapters: dict[str, str] = {}
    refused_adapters: dict[str, tuple[str, str]] = {}
    pid: int = 0
    is_draining: bool = False


class EngineStatus(Struct, frozen=True, kw_only=True):
    """The status of an entity's engine. ``wanted`` is the number of replicas that should run; ``replicas`` are those
    that exist, including draining ones. ``info`` is set once a replica has passed its probe, ``start_seconds`` is the
    longest of the replicas' last starts."""

    entity: str
    wanted: int
    replicas: tuple[ReplicaStatus, ...]
    info: EngineInfo | None = None
    start_seconds: float | None = None

    def _in(self, state: ReplicaState) -> tuple[ReplicaStatus, ...]:
        return tuple(replica for replica in self.replicas if replica.state == state)

    @property
    def ready(self) -> tuple[ReplicaStatus, ...]:
        return self._in("ready")

    @property
    def failed(self) -> tuple[ReplicaStatus, ...]:
        return self._in("failed")


class _Entity:
    __slots__ = ("adapters", "info", "model", "next_index", "removed", "replicas", "start_seconds", "wanted")

    def __init__(self, model: EngineSpec) -> None:
        self.model = model
        self.wanted = self.next_index = 0
        self.removed = False
        self.replicas: dict[int, Replica] = {}
        self.info: EngineInfo | None = None
        self.adapters = NO_ADAPTERS
        self.start_seconds: float | None = None


class Supervisor:
    """The keeper of the engines of all entities. Thread-safe. Not for use in a forked child.

    Only ``close`` and ``await_ready`` wait for engines. ``probe(engine)`` raises while the engine cannot work.
    ``changed()`` is called, on a replica's thread, whenever a state changes. ``in_use(address)`` says whether a worker
    still has requests on a draining replica. ``store`` is the id of the server's ledger, for engines on other hosts.
    """

    def __init__(
        self,
        *,
        state_dir: str | None = None,
        probe: Callable[[Engine], object] = lambda engine: None,
        changed: Callable[[], object] = lambda: None,
        in_use: Callable[[str], bool] = lambda address: False,
        store: str = "",
    ) -> None:
        self._store = store
        self._state_dir, self._probe, self._changed, self._in_use = state_dir, probe, changed, in_use
        self._entities: dict[str, _Entity] = {}
        self._lock = threading.RLock()
        self._closed = False

    def add(self, entity: str, model: EngineSpec, *, replicas: int = 1) -> None:
        """Keep ``replicas`` engines of ``model`` running as ``entity``; a hosted one begins without any.

        Adding the same model again sets the number, and where its files are from now on. Raises ``Conflict`` if
        ``entity`` is another model.
        """
        with self._lock:
            known = self._entities.get(entity)
            if known is None:
                self._entities[entity] = _Entity(model)
            elif not known.model.is_same(model):
                raise Conflict(f"entity {entity!r} is another model")
            else:
                known.model, known.removed = model, False
            if not model.hosted:  # those have ``set_addresses``
                self.set_replicas(entity, replicas)

    def set_replicas(self, entity: str, n: int) -> None:
        """Start or drain replicas until there are ``n``; those with the highest numbers are drained.

        Raises ``NotFound``, ``InvalidField``.
        """
        with self._lock:
            found = self._find(entity)
            maximum = len(found.model.addresses) or MAX_REPLICAS
            if not 0 <= n <= maximum:
                raise InvalidField("replicas", n, f"0 to {maximum}")
            if self._closed:
                return
            found.wanted = n
            for index, replica in found.replicas.items():
                if index >= n:
                    replica.drain()
            for index in range(n):
                running = found.replicas.get(index)
                if running is None or not running.revive():
                    found.replicas[index] = self._start(entity, found, index)

    def set_addresses(self, entity: str, addresses: tuple[str, ...]) -> None:
        """Keep one replica for each engine at ``addresses``, of a hosted entity; those of other addresses are drained.

        Raises ``NotFound``.
        """
        with self._lock:
            found = self._find(entity)
            assert found.model.hosted, "others have the addresses that they were added with"
            if self._closed:
                return
            found.wanted = len(addresses)
            missing = set(addresses)
            for replica in found.replicas.values():
                if replica.address not in addresses:
                    replica.drain()
                elif replica.revive():
                    missing.discard(replica.address)
            for address in (one for one in addresses if one in missing):
                index = found.next_index
                found.next_index += 1
                found.replicas[index] = self._start(entity, found, index, address)

    def set_adapters(self, entity: str, adapters: WantedAdapters) -> None:
        """Set the adapters that all replicas, including later ones, should have in addition to their model's own.

        Raises ``NotFound``.
        """
        with self._lock:
            found = self._find(entity)
            if found.adapters != adapters:
                found.adapters = adapters

    def remove(self, entity: str) -> None:
        """Drain all replicas of ``entity`` and forget it. Raises ``NotFound``."""
        with self._lock:
            found = self._find(entity)
            found.removed = True
            if found.model.hosted:
                self.set_addresses(entity, ())
            else:
                self.set_replicas(entity, 0)
            self._forget(entity, found)

    def entities(self) -> tuple[str, ...]:
        """Return the names of the entities, without removed ones whose replicas may still drain."""
        with self._lock:
            return tuple(name for name, found in self._entities.items() if not found.removed)

    def hosted(self) -> tuple[str, ...]:
        """Return the names of hosted entities, including removed ones whose replicas still drain."""
        with self._lock:
            return tuple(sorted(name for name, found in self._entities.items() if found.model.hosted))

    def status(self, entity: str) -> EngineStatus:
        """Return the status of ``entity``. Raises ``NotFound``."""
        with self._lock:
            found = self._find(entity)
            started = [r.start_seconds for r in found.replicas.values() if r.start_seconds is not None]
            found.start_seconds = max(started, default=found.start_seconds)
            return EngineStatus(
                entity=entity,
                wanted=found.wanted,
                info=found.info,
                start_seconds=found.start_seconds,
                replicas=tuple(_status(index, replica) for index, replica in sorted(found.replicas.items())),
            )

    def load_steps(self) -> dict[str, LoadStep]:
        """Return the steps that loading engines on this host have reached, by address."""
        with self._lock:
            replicas = [one for found in self._entities.values() for one in found.replicas.values()]
        places = [one.address for one in replicas if one.is_here and one.state == "starting"]
        found = {place: StateDirectory(*os.path.split(place)).read_step() for place in places}
        return {place: step for place, step in found.items() if step is not None}

    def engine(self, entity: str, index: int = 0) -> Engine:
        """Return the supervisor's own client of a ready replica. Raises ``NotFound``."""
        with self._lock:
            replica = self._find(entity).replicas.get(index)
            engine = replica.engine if replica is not None and replica.state == "ready" else None
            if engine is None:
                raise NotFound(f"replica {index} of {entity!r} is not ready")
            return engine

    def named_elsewhere(self) -> list[RemoteEngine]:
        """Return the clients of the engines on other hosts that were named, not placed there."""
        with self._lock:
            replicas = [one for found in self._entities.values() for one in found.replicas.values()]
        engines = [one.engine for one in replicas if not one.is_here and not one.is_hosted]
        return [one for one in engines if one is not None and one.generation]

    def await_ready(self, entity: str, *, replicas: int = 1, timeout: float = 60.0) -> EngineStatus:
        """Wait until so many replicas are ready, one has failed, or the time is over; return the status."""
        until = time.monotonic() + timeout
        while True:
            status = self.status(entity)
            if len(status.ready) >= replicas or status.failed or time.monotonic() > until:
                return status
            time.sleep(0.02)

    def close(self, *, timeout: float = 10.0) -> None:
        """Give up all engines without draining; an engine ends once its last client has left."""
        with self._lock:
            self._closed = True
            replicas = [replica for found in self._entities.values() for replica in found.replicas.values()]
        for replica in replicas:
            replica.stop()
        until = time.monotonic() + timeout
        for replica in replicas:
            replica.join(max(0.0, until - time.monotonic()))

    def _find(self, entity: str) -> _Entity:
        found = self._entities.get(entity)
        if found is None:
            raise NotFound(f"no entity {entity!r} is kept")
        return found

    def _start(self, entity: str, found: _Entity, index: int, address: str | None = None) -> Replica:
        model = found.model if address is None else msgspec.structs.replace(found.model, addresses=(address,))

        def probe(engine: Engine) -> None:
            self._probe(engine)
            self._check_alike(found, engine.info)
            found.info = engine.info

        def ended(replica: Replica) -> None:
            with self._lock:
                if found.replicas.get(index) is replica:
                    del found.replicas[index]
                self._forget(entity, found)
            self._changed()

        return Replica(
            model,
            index=index if address is None else 0,
            state_dir=self._state_dir,
            probe=probe,
            changed=self._changed,
            in_use=self._in_use,
            ended=ended,
            adapters=AdapterSync(lambda: found.adapters),
            store=self._store,
        )

    def _check_alike(self, found: _Entity, info: EngineInfo) -> None:
        """Check that a replica is like the others, since a request may begin on one and end on another.

        Raises ``PackagingError``.
        """
        with self._lock:
            ready = [replica.engine for replica in found.replicas.values() if replica.state == "ready"]
        for other in (engine.info for engine in ready if engine is not None):
            for name in ALIKE:
                one, two = getattr(info, name), getattr(other, name)
                if one != two:
                    raise PackagingError(f"its {name} is {one}, that of another replica is {two}: start them alike")

    def _forget(self, entity: str, found: _Entity) -> None:
        if found.removed and not found.replicas and self._entities.get(entity) is found:
            del self._entities[entity]


def _status(index: int, replica: Replica) -> ReplicaStatus:
    engine = replica.engine
    health = engine.health() if engine is not None else Health(status="starting")
    if replica.state == "failed":
        health = msgspec.structs.replace(health, status="dead")
    return ReplicaStatus(
        index=index,
        address=replica.address,
        state=replica.state,
        health=health,
        restarts=replica.restarts,
        message=replica.message,
        failed_log=replica.failed_log,
        pid=engine.info.pid if engine is not None and replica.is_here and replica.state == "ready" else 0,
        was_ready=replica.was_ready,
        is_draining=replica.is_draining,
        adapters=dict(replica.adapters.loaded),
        refused_adapters=dict(replica.adapters.refused),
    )


__all__ = ["EngineSpec", "EngineStatus", "ReplicaStatus", "Supervisor"]
