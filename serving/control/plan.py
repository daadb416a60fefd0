"""The plan says what a server's workers serve; controller process and workers agree on it through files.

::

    plan.json            what is served, replaced as a whole; ``generation`` grows with every change
    workers/<id>         held (flock) by a worker as long as it lives
    workers/<id>.json    its ``WorkerState``: the generation it has adopted, the engines it may still have requests on
    logs/<hash>          the log of an engine whose load failed, by endpoint and served entity
    engines.json         what the controller process has recorded of each engine (``EngineRecord``)
    wanted/<key>         touched by a worker that has a request and no replica to run it
    gateway              the id of this server among the gateways of its database
    changed              touched by a worker after that, or after it has changed the endpoints' store

The endpoints' store is authoritative; the plan is what the controller process has realised of it on this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from ..endpoints.config import EntityConfig, Route
from ..interface.dialect_settings import DialectSettings
from ..interface.engine import EngineInfo, EngineRecord, engine_name
from ..interface.guardrails import Guardrails
from ..interface.payload_log import PayloadLog
from ..interface.settings import PrefixSharing
from ..system.file_locks import create_locked, is_held, try_acquire
from ..system.files import replace_file


class PlannedAdapter(Struct, frozen=True, kw_only=True):
    """An adapter that was loaded while its endpoint was served.

    Every replica has it, unless ``refusal`` says why one refused it. ``template`` is the chat template that it has of
    its own; "" if its requests use the model's. ``content_hash`` is that of its files; "" for one of an earlier
    release.
    """

    name: str
    revision: str
    refusal: str = ""
    template: str = ""
    content_hash: str = ""

    @property
    def engine_name(self) -> str:
        """The name that engines have for it."""
        return engine_name(self.name, self.content_hash)


class PlannedEntity(Struct, frozen=True, kw_only=True):
    """A served entity whose engines run.

    ``key`` names its engine, ``addresses`` are the replicas that requests may go to, and ``facts`` what
    ``Autoscaler.prepare`` has measured. ``withdrawn`` are adapters that engines may still have, by the engines' names,
    but that requests may no longer use."""

    config: EntityConfig = field(name="served")
    key: str
    info: EngineInfo
    addresses: tuple[str, ...]
    facts: dict[str, Any] = {}
    adapters: tuple[PlannedAdapter, ...] = ()
    withdrawn: tuple[str, ...] = ()


class PlannedEndpoint(Struct, frozen=True, kw_only=True):
    """An endpoint as workers serve it. ``created`` is in Unix seconds; ``id`` differs from that of an earlier endpoint
    with the same name."""

    name: str
    id: str
    version: int
    created: int
    entities: tuple[PlannedEntity, ...]
    routes: tuple[Route, ...]
    sticky: bool = False
    profile: str | None = None
    prefix_sharing: PrefixSharing | None = None
    payload_log: PayloadLog | None = None
    guardrails: Guardrails | None = None
    dialects: DialectSettings = DialectSettings()


class Plan(Struct, frozen=True, kw_only=True):
    """All that a server's workers serve; ``generation`` is 0 before the first plan. ``missing`` are the names of
    endpoints that have an active config, and are not served here."""

    generation: int = 0
    endpoints: tuple[PlannedEndpoint, ...] = ()
    missing: tuple[str, ...] = ()


class WorkerState(Struct, frozen=True, kw_only=True):
    """The plan generation that a worker has adopted, and the addresses of engines that may still have its requests."""

    generation: int = -1
    addresses: tuple[str, ...] = ()


class EngineRecords(Struct, frozen=True, kw_only=True):
    """The records of the engines, by engine key; ``budget`` is the server's ``engine_memory_budget``."""

    budget: int | None = None
    engines: dict[str, EngineRecord] = {}


class PlanDirectory:
    """The plan's files in the server's ``directory``. The controller process and each worker have their own object."""

    def __init__(self, directory: str | Path) -> None:
        self._plan = Path(directory, "plan.json")
        self._workers = Path(directory, "workers")
        self._wanted = Path(directory, "wanted")
        self._logs = Path(directory, "logs")
        self._engines = Path(directory, "engines.json")
        self._changed = Path(directory, "changed")
        self._gateway = Path(directory, "gateway")

    def gateway(self) -> str:
        """Return the id of this server among the gateways of its database; a new one at the first call."""
        with contextlib.suppress(FileNotFoundError):
            return self._gateway.read_text(encoding="ascii")
        replace_file(self._gateway, (new := secrets.token_hex(8)).encode())
        return new

    def publish(self, plan: Plan) -> None:
        """Replace the plan as a whole. Raises ``OSError``."""
        replace_file(self._plan, msgspec.json.encode(plan))

    def read(self) -> Plan:
        """Return the newest plan; an empty one before the first."""
        try:
            return msgspec.json.decode(self._plan.read_bytes(), type=Plan)
        except FileNotFoundError:
            return Plan()

    def stamp(self) -> tuple[int, int]:
        """Return a value that changes whenever the plan does; cheap enough to call many times a second."""
        return _stamp(self._plan)

    def note_change(self) -> None:
        """Have the controller process check the endpoints' store and the requests for replicas at once."""
        with contextlib.suppress(OSError):  # it checks soon anyway; the directory is gone when the server ends
            self._changed.touch()

    def change_stamp(self) -> tuple[int, int]:
        """Return a value that changes with every ``note_change``."""
        return _stamp(self._changed)

    def add_worker(self) -> WorkerFile:
        """Create a new worker's file, and remove those of workers that were killed."""
        self._workers.mkdir(exist_ok=True)
        for path in self._locks():
            lock = try_acquire(str(path))
            if lock is not None:
                path.with_suffix(".json").unlink(missing_ok=True)
                lock.release(unlink=True)
        return WorkerFile(self._workers)

    def workers(self) -> tuple[WorkerState, ...]:
        """Return the states that the live workers have written."""
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
        """Return whether every live worker serves plan ``generation`` or a later one."""
        return all(worker.generation >= generation for worker in self.workers())

    def in_use(self, address: str) -> bool:
        """Return whether a live worker may still have requests on the engine at ``address``."""
        return any(address in worker.addresses for worker in self.workers())

    def save_failed_log(self, endpoint_id: str, entity: str, text: str) -> None:
        """Save the log of an engine that failed to load; an empty ``text`` removes it, since the engine loads again."""
        path = self._log_of(endpoint_id, entity)
        if not text:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(exist_ok=True)
        replace_file(path, text.encode(errors="replace"))

    def failed_log(self, endpoint_id: str, entity: str) -> str:
        """Return the log of an engine of ``entity`` whose load failed, "" if there is none."""
        try:
            return self._log_of(endpoint_id, entity).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def _log_of(self, endpoint_id: str, entity: str) -> Path:
        return self._logs / hashlib.sha256(f"{endpoint_id}\n{entity}".encode()).hexdigest()

    def save_engines(self, records: EngineRecords) -> None:
        """Replace the records of the engines. Raises ``OSError``."""
        replace_file(self._engines, msgspec.json.encode(records))

    def engines(self) -> EngineRecords:
        """Return the records of the engines; empty before the first are saved."""
        try:
            return msgspec.json.decode(self._engines.read_bytes(), type=EngineRecords)
        except FileNotFoundError:
            return EngineRecords()

    def request_replica(self, key: str) -> None:
        """Ask for a replica of the engine ``key`` for a waiting request. Raises ``OSError`` after the server's end."""
        self._wanted.mkdir(exist_ok=True)
        (self._wanted / key).touch()
        os.utime(self._wanted / key, (now := time.monotonic(), now))
        self.note_change()

    def replica_requested_at(self, key: str) -> float | None:
        """Return when ``request_replica`` was last called, or None for never.

        The time is ``time.monotonic``, which all processes of a host share.
        """
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
    """A live worker's state, which the controller process reads."""

    def __init__(self, workers: Path) -> None:
        name = uuid.uuid4().hex
        self._path = workers / f"{name}.json"
        self.write(WorkerState())  # before the lock, by which workers are found: a live worker always has a state
        self._lock = create_locked(str(workers / name))

    def write(self, state: WorkerState) -> None:
        """Replace the state that the controller process reads."""
        replace_file(self._path, msgspec.json.encode(state))

    def remove(self) -> None:
        """Remove the files when the worker ends."""
        self._path.unlink(missing_ok=True)
        self._lock.release(unlink=True)
