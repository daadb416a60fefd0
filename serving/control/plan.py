"""Where the keeper tells the workers what to serve, and they tell what they hold: files in the server's own directory.

::

    plan.json            what is served, replaced as a whole; ``generation`` grows with every change
    workers/<id>         held (flock) by a worker as long as it lives
    workers/<id>.json    ``Held``: the generation it has adopted, and the engines it may still have requests on
    logs/<hash>          what an engine wrote whose load failed, by endpoint and served entity
    wanted/<key>         touched by a worker that has a request and no replica to run it

The endpoints' store is the truth; the plan is what the keeper has made of it on this machine.
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
from msgspec import Struct

from ..endpoints.config import Route, ServedEntity
from ..engine.interface import EngineInfo
from ..file_locks import FileLock, acquire, is_held
from ..files import replace_file
from ..settings import PrefixSharing


class PlannedEntity(Struct, frozen=True, kw_only=True):
    """A served entity: ``key`` names its engine, ``addresses`` the replicas that requests may go to, ``facts`` what was
    measured of it (see ``scaler``)."""

    served: ServedEntity
    key: str
    info: EngineInfo
    addresses: tuple[str, ...]
    facts: dict[str, Any] = {}


class PlannedEndpoint(Struct, frozen=True, kw_only=True):
    """``created`` is Unix seconds; ``id`` tells it from an earlier one of the same name."""

    name: str
    id: str
    version: int
    created: int
    entities: tuple[PlannedEntity, ...]
    routes: tuple[Route, ...]
    sticky: bool = False
    profile: str | None = None
    prefix_sharing: PrefixSharing | None = None


class Plan(Struct, frozen=True, kw_only=True):
    generation: int = 0
    endpoints: tuple[PlannedEndpoint, ...] = ()


class Held(Struct, frozen=True, kw_only=True):
    generation: int = -1
    addresses: tuple[str, ...] = ()


class Board:
    """``directory`` is the server's. The keeper publishes, workers follow; each through a ``Board`` of its own."""

    def __init__(self, directory: str | Path) -> None:
        self._plan = Path(directory, "plan.json")
        self._workers = Path(directory, "workers")
        self._wanted = Path(directory, "wanted")
        for folder in (self._workers, self._wanted):
            folder.mkdir(exist_ok=True)

    def publish(self, plan: Plan) -> None:
        replace_file(self._plan, msgspec.json.encode(plan))

    def read(self) -> Plan:
        """The newest plan; an empty one before the first."""
        try:
            return msgspec.json.decode(self._plan.read_bytes(), type=Plan)
        except FileNotFoundError:
            return Plan()

    def stamp(self) -> tuple[int, int]:
        """Changes whenever the plan does; cheap enough to be asked many times a second."""
        try:
            found = os.stat(self._plan)
        except FileNotFoundError:
            return (0, 0)
        return (found.st_ino, found.st_mtime_ns)

    def held(self) -> tuple[Held, ...]:
        """What the living workers hold. Files of dead ones are removed."""
        found = []
        for lock in self._workers.iterdir():
            if lock.suffix == ".json" or lock.suffix == ".new":
                continue
            if is_held(str(lock)):
                with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                    found.append(msgspec.json.decode(lock.with_suffix(".json").read_bytes(), type=Held))
                continue
            for path in (lock.with_suffix(".json"), lock):
                path.unlink(missing_ok=True)
        return tuple(found)

    def adopted(self, generation: int) -> bool:
        """Whether every living worker serves plan ``generation`` or a later one."""
        return all(held.generation >= generation for held in self.held())

    def in_use(self, address: str) -> bool:
        return any(address in held.addresses for held in self.held())

    def join(self) -> Post:
        """A worker's place on the board."""
        return Post(self._workers)

    def keep_log(self, endpoint_id: str, entity: str, text: str) -> None:
        """What an engine wrote that failed to load; no ``text``: it loads again."""
        path = self._log_of(endpoint_id, entity)
        if not text:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(exist_ok=True)
        replace_file(path, text.encode(errors="replace"))

    def kept_log(self, endpoint_id: str, entity: str) -> str:
        try:
            return self._log_of(endpoint_id, entity).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def _log_of(self, endpoint_id: str, entity: str) -> Path:
        name = hashlib.sha256(f"{endpoint_id}\n{entity}".encode()).hexdigest()
        return self._plan.parent / "logs" / name

    def want(self, key: str) -> None:
        """A worker has a request for the engine ``key`` and no replica."""
        (self._wanted / key).touch()
        os.utime(self._wanted / key, (now := time.monotonic(), now))

    def wanted_at(self, key: str) -> float | None:
        """When ``want`` was last called, by ``time.monotonic``, which all processes of a host share; None for never."""
        try:
            return os.stat(self._wanted / key).st_mtime
        except FileNotFoundError:
            return None


class Post:
    """Written before the lock is taken, so that a living worker is never without a word."""

    def __init__(self, workers: Path) -> None:
        name = uuid.uuid4().hex
        self._path = workers / f"{name}.json"
        self.tell(Held())
        self._lock: FileLock = acquire(str(workers / name), make_parent=lambda: workers.mkdir(exist_ok=True))

    def tell(self, held: Held) -> None:
        replace_file(self._path, msgspec.json.encode(held))

    def leave(self) -> None:
        self._path.unlink(missing_ok=True)
        self._lock.release(unlink=True)
