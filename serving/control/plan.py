"""The plan: what a server's workers are to serve, and the files by which controller process and workers agree on it.

::

    plan.json            what is served, replaced as a whole; ``generation`` grows with every change
    workers/<id>         held (flock) by a worker as long as it lives
    workers/<id>.json    its ``WorkerState``: the generation it has adopted, the engines it may still have requests on
    logs/<hash>          what an engine wrote whose load failed, by endpoint and served entity
    engines.json         what the controller process has seen of each engine (``EngineRecord``)
    wanted/<key>         touched by a worker that has a request and no replica to run it
    changed              touched by a worker that has done so, or changed the endpoints' store

The endpoints' store is the truth; the plan is what the controller process has made of it on this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from ..dialect_settings import DialectSettings
from ..endpoints.config import EntityConfig, Route
from ..engine.interface import EngineInfo, EngineRecord
from ..file_locks import create_locked, is_held, try_acquire
from ..files import replace_file
from ..settings import PrefixSharing


class PlannedAdapter(Struct, frozen=True, kw_only=True):
    """An adapter that was loaded while its endpoint was served: every replica has it, or one refused it, and why."""

    name: str
    revision: str
    refusal: str = ""


class PlannedEntity(Struct, frozen=True, kw_only=True):
    """A served entity whose engines run. ``key`` names its engine, ``addresses`` are the replicas that requests may go
    to, ``facts`` what was measured of it (``Autoscaler.prepare``). ``withdrawn`` are adapters that engines may have
    still, and requests no more."""

    config: EntityConfig = field(name="served")
    key: str
    info: EngineInfo
    addresses: tuple[str, ...]
    facts: dict[str, Any] = {}
    adapters: tuple[PlannedAdapter, ...] = ()
    withdrawn: tuple[str, ...] = ()


class PlannedEndpoint(Struct, frozen=True, kw_only=True):
    """An endpoint as workers are to serve it. ``created`` is Unix seconds; ``id`` tells it from an earlier one of the
    same name."""

    name: str
    id: str
    version: int
    created: int
    entities: tuple[PlannedEntity, ...]
    routes: tuple[Route, ...]
    sticky: bool = False
    profile: str | None = None
    prefix_sharing: PrefixSharing | None = None
    dialects: DialectSettings = DialectSettings()


class Plan(Struct, frozen=True, kw_only=True):
    """All that a server's workers serve; ``generation`` 0 before the first."""

    generation: int = 0
    endpoints: tuple[PlannedEndpoint, ...] = ()


class WorkerState(Struct, frozen=True, kw_only=True):
    """What a worker has adopted, and the addresses of engines that it may still have requests on."""

    generation: int = -1
    addresses: tuple[str, ...] = ()


class EngineRecords(Struct, frozen=True, kw_only=True):
    """By engine key; ``budget`` is the server's ``engine_memory_budget``."""

    budget: int | None = None
    engines: dict[str, EngineRecord] = {}


class PlanDirectory:
    """The plan's files in the server's ``directory``. Controller process and workers have an object each."""

    def __init__(self, directory: str | Path) -> None:
        self._plan = Path(directory, "plan.json")
        self._workers = Path(directory, "workers")
        self._wanted = Path(directory, "wanted")
        self._logs = Path(directory, "logs")
        self._engines = Path(directory, "engines.json")
        self._changed = Path(directory, "changed")

    def publish(self, plan: Plan) -> None:
        """Replace the plan as a whole. Raises ``OSError``."""
        replace_file(self._plan, msgspec.json.encode(plan))

    def read(self) -> Plan:
        """The newest plan; an empty one before the first."""
        try:
            return msgspec.json.decode(self._plan.read_bytes(), type=Plan)
        except FileNotFoundError:
            return Plan()

    def stamp(self) -> tuple[int, int]:
        """Changes whenever the plan does; cheap enough to be asked many times a second."""
        return _stamp(self._plan)

    def note_change(self) -> None:
        """Have the controller process look at the endpoints' store and at requests for replicas at once."""
        with contextlib.suppress(OSError):  # else it looks soon; the server's directory is gone at its end
            self._changed.touch()

    def change_stamp(self) -> tuple[int, int]:
        """Changes with every ``note_change``."""
        return _stamp(self._changed)

    def add_worker(self) -> WorkerFile:
        """A new worker's file. Those of workers that were killed are removed."""
        self._workers.mkdir(exist_ok=True)
        for path in self._locks():
            lock = try_acquire(str(path))
            if lock is not None:
                path.with_suffix(".json").unlink(missing_ok=True)
                lock.release(unlink=True)
        return WorkerFile(self._workers)

    def workers(self) -> tuple[WorkerState, ...]:
        """What the living workers have written."""
        found = []
        for lock in self._locks():
            if is_held(str(lock)):
                with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                    found.append(msgspec.json.decode(lock.with_suffix(".json").read_bytes(), type=WorkerState))
        return tuple(found)

    def _locks(self) -> list[Path]:
        try:
            return [path for path in self._workers.iterdir() if not path.suffix and not path.name.startswith(".")]
        except FileNotFoundError:
            return []

    def is_adopted(self, generation: int) -> bool:
        """Whether every living worker serves plan ``generation`` or a later one."""
        return all(worker.generation >= generation for worker in self.workers())

    def in_use(self, address: str) -> bool:
        """Whether a living worker may still have requests on the engine at ``address``."""
        return any(address in worker.addresses for worker in self.workers())

    def save_failed_log(self, endpoint_id: str, entity: str, text: str) -> None:
        """Keep what an engine wrote that failed to load; no ``text``: it loads again."""
        path = self._log_of(endpoint_id, entity)
        if not text:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(exist_ok=True)
        replace_file(path, text.encode(errors="replace"))

    def failed_log(self, endpoint_id: str, entity: str) -> str:
        """What an engine of ``entity`` wrote whose load failed; empty where none has."""
        try:
            return self._log_of(endpoint_id, entity).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def _log_of(self, endpoint_id: str, entity: str) -> Path:
        return self._logs / hashlib.sha256(f"{endpoint_id}\n{entity}".encode()).hexdigest()

    def save_engines(self, records: EngineRecords) -> None:
        """Replace what is known of the engines. Raises ``OSError``."""
        replace_file(self._engines, msgspec.json.encode(records))

    def engines(self) -> EngineRecords:
        """What is known of the engines; nothing before the first look."""
        try:
            return msgspec.json.decode(self._engines.read_bytes(), type=EngineRecords)
        except FileNotFoundError:
            return EngineRecords()

    def request_replica(self, key: str) -> None:
        """A worker has a request for the engine ``key`` and no replica. Raises ``OSError`` after the server's end."""
        self._wanted.mkdir(exist_ok=True)
        (self._wanted / key).touch()
        os.utime(self._wanted / key, (now := time.monotonic(), now))
        self.note_change()

    def replica_requested_at(self, key: str) -> float | None:
        """When ``request_replica`` was last called, by ``time.monotonic``, which all processes of a host share; None
        for never."""
        try:
            return os.stat(self._wanted / key).st_mtime
        except FileNotFoundError:
            return None


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return (0, 0)
    return (found.st_ino, found.st_mtime_ns)


class WorkerFile:
    """A living worker's state, for the controller process to read."""

    def __init__(self, workers: Path) -> None:
        name = uuid.uuid4().hex
        self._path = workers / f"{name}.json"
        self.write(WorkerState())  # before the lock, by which it is found: a living worker always has one
        self._lock = create_locked(str(workers / name))

    def write(self, state: WorkerState) -> None:
        """Replace what the controller process reads of this worker."""
        replace_file(self._path, msgspec.json.encode(state))

    def remove(self) -> None:
        """The worker ends."""
        self._path.unlink(missing_ok=True)
        self._lock.release(unlink=True)
