"""Endpoints behind the Databricks management API: one row each in the metering store, changed in transactions.

::

    config_update   NOT_UPDATING ── update ──► IN_PROGRESS ── mark_ready ──► NOT_UPDATING   the new config is active
                         ▲                      │    update: Conflict
                         │                      └─ mark_failed ─► UPDATE_FAILED             the old one stays active
                         └──── mark_ready ◄── IN_PROGRESS ◄── update ──┘

``ready`` is READY while an active config is being served. Whoever runs the engines watches ``pending``, warms the
entities up and then calls ``mark_ready`` or ``mark_failed`` with the config's version: a report on another version than
the pending one is stale and changes nothing.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from ..errors import AlreadyExists, Conflict, InvalidField, NotFound
from ..metering.store import Store
from ..metering.tables import endpoint_configs, endpoints, limits, windows
from ..request import Task
from .endpoint_config import (
    NAME,
    EndpointConfig,
    ServedEntity,
    parse_config,
    parse_rate_limits,
    parse_tags,
)
from .endpoint_rows import decode_config, find_row, set_outcome, set_rates, set_tags, stored_config
from .endpoint_views import endpoint_to_wire, rate_limits_to_wire, tags_to_wire
from .traffic import TrafficSplit

_CREATE_FIELDS = {"name", "config", "tags", "rate_limits", "description"}


class Pending(Struct, frozen=True, kw_only=True):
    """A config that waits to be served."""

    name: str
    version: int
    config: EndpointConfig


class Active(Struct, frozen=True, kw_only=True):
    """What an endpoint serves now."""

    name: str
    version: int
    tasks: tuple[Task, ...]
    config: EndpointConfig
    ready: bool


class Endpoints:
    """``inspect(entity)`` gives the tasks of a registry entity, and raises ``NotFound`` where there is none.

    It is called outside transactions. Every method that takes a ``name`` raises ``NotFound`` for an unknown one.
    """

    def __init__(
        self,
        store: Store,
        *,
        inspect: Callable[[ServedEntity], tuple[Task, ...]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._inspect = inspect
        self._clock = clock

    def create(self, body: dict[str, Any], *, creator: str = "") -> dict[str, Any]:
        """``POST /api/2.0/serving-endpoints``. Raises ``AlreadyExists``, ``InvalidField``."""
        for field in body:
            if field not in _CREATE_FIELDS:
                raise InvalidField(field, body[field], "no such field; known are " + ", ".join(sorted(_CREATE_FIELDS)))
        name = body.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidField("name", name, "1 to 63 letters, digits, dashes and underscores")
        description = body.get("description") or ""
        if not isinstance(description, str) or len(description) > 4096:
            raise InvalidField("description", description, "a text of at most 4096 characters")
        config = parse_config(body.get("config"))
        tags, rates = parse_tags(body.get("tags") or []), parse_rate_limits(body.get("rate_limits") or [])
        tasks = self._tasks(config)

        def work(connection: sa.Connection) -> None:
            now = self._now_ms()
            row = {"name": name, "id": secrets.token_hex(16), "creator": creator, "description": description}
            row |= {"tasks": " ".join(tasks), "ready": "NOT_READY", "config_update": "IN_PROGRESS", "message": ""}
            new = self._store.insert(endpoints).values(
                **row, created_ms=now, updated_ms=now, pending_version=1, last_version=1
            )
            if connection.execute(new.on_conflict_do_nothing()).rowcount != 1:
                raise AlreadyExists(f"there is an endpoint {name!r} already")
            self._add_config(connection, name, 1, config, tasks)
            set_tags(connection, name, tags, ())
            set_rates(connection, name, rates)

        self._store.write(work)
        return self.get(name)

    def get(self, name: str) -> dict[str, Any]:
        return self._store.read(lambda connection: self._view(connection, find_row(connection, name)))

    def list(self) -> dict[str, Any]:
        """``{"endpoints": […]}`` by name."""

        def work(connection: sa.Connection) -> dict[str, Any]:
            rows = connection.execute(sa.select(endpoints).order_by(endpoints.c.name)).all()
            return {"endpoints": [self._view(connection, row) for row in rows]}

        return self._store.read(work)

    def delete(self, name: str) -> None:
        """The endpoint, its configs, tags and limits go; its ledger rows stay."""

        def work(connection: sa.Connection) -> None:
            self._store.lock_ledger(connection)
            find_row(connection, name)
            for table in (limits, windows):
                connection.execute(sa.delete(table).where(table.c.scope == "endpoint", table.c.subject == name))
            connection.execute(sa.delete(limits).where(limits.c.scope == "user", limits.c.subject == name))
            of_users = windows.c.subject.startswith(f"{name}\n", autoescape=True)
            connection.execute(sa.delete(windows).where(windows.c.scope == "user", of_users))
            connection.execute(sa.delete(endpoints).where(endpoints.c.name == name))

        self._store.write(work)

    def update_config(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """``PUT …/{name}/config``. Raises ``Conflict`` while an update runs, ``InvalidField``."""
        if isinstance(body, dict) and body.get("name") not in (None, name):
            raise InvalidField("name", body["name"], f"{name!r}: an endpoint keeps its name")
        config = parse_config(body)
        tasks = self._tasks(config)

        def work(connection: sa.Connection) -> None:
            row = find_row(connection, name)
            if row.config_update == "IN_PROGRESS":
                raise Conflict(f"an update of {name!r} is in progress; try again when it has ended")
            version = row.last_version + 1
            self._add_config(connection, name, version, config, tasks)
            self._change(
                connection, name, config_update="IN_PROGRESS", message="", pending_version=version, last_version=version
            )

        self._store.write(work)
        return self.get(name)

    def put_rate_limits(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """``PUT …/{name}/rate-limits``: replaces the calls a minute of the endpoint and of each of its users."""
        rates = parse_rate_limits(body.get("rate_limits") or [])

        def work(connection: sa.Connection) -> dict[str, Any]:
            find_row(connection, name)
            set_rates(connection, name, rates)
            return {"rate_limits": rate_limits_to_wire(connection, name)}

        return self._store.write(work)

    def patch_tags(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """``PATCH …/{name}/tags`` with ``add_tags`` and ``delete_tags``; the tags as they are then."""
        added = parse_tags(body.get("add_tags") or [], "add_tags")
        deleted = body.get("delete_tags") or []
        if not isinstance(deleted, list) or not all(isinstance(key, str) for key in deleted):
            raise InvalidField("delete_tags", deleted, "a list of keys")

        def work(connection: sa.Connection) -> dict[str, Any]:
            find_row(connection, name)
            set_tags(connection, name, added, tuple(deleted))
            self._change(connection, name)
            return {"tags": tags_to_wire(connection, name)}

        return self._store.write(work)

    def pending(self) -> tuple[Pending, ...]:
        """Every update that is in progress."""
        joined = sa.and_(
            endpoint_configs.c.name == endpoints.c.name, endpoint_configs.c.version == endpoints.c.pending_version
        )
        query = sa.select(endpoints.c.name, endpoint_configs.c.version, endpoint_configs.c.config)
        query = query.join(endpoint_configs, joined).where(endpoints.c.config_update == "IN_PROGRESS")
        rows = self._store.read(lambda connection: connection.execute(query.order_by(endpoints.c.name)).all())
        return tuple(Pending(name=row.name, version=row.version, config=decode_config(row.config)) for row in rows)

    def active(self, name: str) -> Active:
        """What ``name`` serves. Raises ``NotFound`` before its first config was ready, too."""

        def work(connection: sa.Connection) -> Active:
            row = find_row(connection, name)
            if row.active_version is None:
                raise NotFound(f"endpoint {name!r} is not ready yet")
            config, tasks = stored_config(connection, name, row.active_version)
            ready = row.ready == "READY"
            return Active(name=name, version=row.active_version, tasks=tasks, config=config, ready=ready)

        return self._store.read(work)

    def mark_ready(self, name: str, version: int) -> bool:
        """``version`` is served now. False where it is not the pending one (nothing changes)."""

        def work(connection: sa.Connection) -> bool:
            row = find_row(connection, name)
            if row.config_update != "IN_PROGRESS" or row.pending_version != version:
                return False
            _, tasks = stored_config(connection, name, version)
            self._change(
                connection,
                name,
                ready="READY",
                config_update="NOT_UPDATING",
                message="",
                active_version=version,
                pending_version=None,
                tasks=" ".join(tasks),
            )
            set_outcome(connection, name, version, "active")
            return True

        return self._store.write(work)

    def mark_failed(self, name: str, version: int, message: str) -> bool:
        """``version`` cannot be served: the endpoint stays on its active config. False where it is not pending."""

        def work(connection: sa.Connection) -> bool:
            row = find_row(connection, name)
            if row.config_update != "IN_PROGRESS" or row.pending_version != version:
                return False
            self._change(connection, name, config_update="UPDATE_FAILED", message=message[:4096], pending_version=None)
            set_outcome(connection, name, version, "failed")
            return True

        return self._store.write(work)

    def set_ready(self, name: str, ready: bool) -> None:
        """Whether the active config is being served at the moment (an engine died; it is back)."""

        def work(connection: sa.Connection) -> None:
            row = find_row(connection, name)
            if ready and row.active_version is None:
                raise Conflict(f"endpoint {name!r} has no active config to be ready with")
            self._change(connection, name, ready="READY" if ready else "NOT_READY")

        self._store.write(work)

    def split(self, active: Active) -> TrafficSplit:
        """The traffic split of an active config; one a worker, kept as long as the version is the same."""
        return TrafficSplit(active.name, active.config.routes, start=secrets.randbits(64))

    def _tasks(self, config: EndpointConfig) -> tuple[Task, ...]:
        """The tasks that every entity exposes, the same for all. Raises ``InvalidField``."""
        found: tuple[Task, ...] | None = None
        for place, entity in enumerate(config.served_entities):
            tasks = tuple(sorted(self._inspect(entity)))
            if found is not None and tasks != found:
                field = f"config.served_entities[{place}]"
                first = config.served_entities[0].name
                raise InvalidField(field, list(tasks), f"the same tasks as {first!r}: {', '.join(found)}")
            found = tasks
        assert found is not None
        return found

    def _add_config(
        self, connection: sa.Connection, name: str, version: int, config: EndpointConfig, tasks: tuple[Task, ...]
    ) -> None:
        row = {"name": name, "version": version, "config": msgspec.json.encode(config).decode()}
        row |= {"tasks": " ".join(tasks), "created_ms": self._now_ms(), "outcome": "pending"}
        connection.execute(sa.insert(endpoint_configs).values(row))

    def _change(self, connection: sa.Connection, name: str, **values: Any) -> None:
        update = sa.update(endpoints).where(endpoints.c.name == name)
        connection.execute(update.values(**values, updated_ms=self._now_ms()))

    def _view(self, connection: sa.Connection, row: sa.Row) -> dict[str, Any]:
        return endpoint_to_wire(connection, row, lambda version: stored_config(connection, row.name, version)[0])

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)
