"""The endpoints of the Databricks management API: one row each in the metering store, changed in transactions.

::

    config_update   NOT_UPDATING ── update ──► IN_PROGRESS ── mark_ready ──► NOT_UPDATING   the new config is active
                         ▲                      │    update: Conflict
                         │                      └─ mark_failed ─► UPDATE_FAILED             the old one stays active
                         └──── mark_ready ◄── IN_PROGRESS ◄── update ──┘

``ready`` is READY while an active config is being served by every gateway. The reconciler of each gateway watches
``states``, warms up the pending entities and reports that (``gateways``); the leader among them then calls
``mark_ready`` or ``mark_failed`` with the config's version. A report about a version that is not the pending one is
stale and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from ..interface.errors import AlreadyExists, Conflict, InvalidField, NotFound
from ..metering.accounts.audit import Actor, record
from ..metering.accounts.authorization import ANONYMOUS, Caller
from ..metering.store.outbox import EventOutbox
from ..metering.store.store import Store
from ..metering.store.tables import endpoints
from .adapters import EndpointAdapters
from .config import (
    EndpointConfig,
    EntityConfig,
    ModelSource,
    PlacementSetting,
    config_to_wire,
    is_same,
    with_sources_of,
    without_canary,
)
from .config_body import as_written, check_model, check_placement, config_body
from .engine_hosts import EngineHosts, Placed, placed_in
from .events import tell
from .following import Following
from .gateways import Fence, Gateway, Gateways, check_fence, gateways_in
from .history import config_version, version_to_restore
from .management_body import NEW_ENDPOINT, NEW_RATE_LIMITS, ROLLBACK, TAG_CHANGES
from .rows import (
    MAX_MESSAGE,
    begin_update,
    change_endpoint,
    config_rows,
    decode_config,
    delete_endpoint,
    encode_config,
    find_row,
    insert_endpoint,
    is_operators,
    must_be_new,
    set_operators,
    set_outcome,
    set_rates,
    set_tags,
    stored_config,
    tasks_of,
)
from .scale import Scale
from .views import by_gateway, by_host, endpoint_in_brief, endpoint_to_wire, rate_limits_to_wire, tags_to_wire


class EndpointState(Struct, frozen=True, kw_only=True):
    """The state of an endpoint, without its configs. ``id`` differs from that of an earlier endpoint with the same
    name; ``message`` says why its last update failed."""

    name: str
    id: str
    created_ms: int
    ready: bool
    active_version: int | None
    pending_version: int | None
    last_version: int = 0
    config_update: str = "NOT_UPDATING"
    message: str = ""


class EndpointStore:
    """The endpoints of a store, as the management API changes and shows them.

    ``locate(entities)`` finds the models of served entities and raises ``NotFound``, ``InvalidField``. It may take
    seconds and is called outside transactions. ``changed()`` is called after a change of what is served. Methods that
    take a ``name`` raise ``NotFound`` if it is unknown. ``outbox`` takes the events of rollouts, for webhooks.
    ``placement`` is that of entities of which neither a request nor the endpoint's present config says where their
    engines run, and ``scale`` theirs if a runtime starts their hosts.
    """

    def __init__(
        self,
        store: Store,
        *,
        locate: Callable[[tuple[EntityConfig, ...]], tuple[ModelSource, ...]],
        clock: Callable[[], float] = time.time,
        changed: Callable[[], None] = lambda: None,
        outbox: EventOutbox | None = None,
        placement: PlacementSetting = "local",
        scale: Scale | None = None,
    ) -> None:
        self._store, self._outbox = store, outbox
        self._placement, self._scale = placement, scale
        self._locate = locate
        self._clock = clock
        self._changed = changed
        self.adapters = EndpointAdapters(store, clock, changed)
        self.gateways = Gateways(store)
        self.following = Following(store, clock, changed, outbox)
        self.hosts = EngineHosts(store)

    def create(self, body: dict[str, Any], *, by: Actor | None = None) -> dict[str, Any]:
        """Create an endpoint (``POST /api/2.0/serving-endpoints``). Raises ``AlreadyExists``, ``InvalidField``."""
        given = NEW_ENDPOINT(body, "")
        name = given["name"]
        self._store.read(lambda connection: must_be_new(connection, name))  # before models are looked up
        config = self._located(given["config"], body["config"], "config")

        def work(connection: sa.Connection) -> None:
            description = given.get("description", "")
            insert_endpoint(self._store, connection, name, config, self._now_ms(), by=by, description=description)
            set_tags(connection, name, given.get("tags", {}), ())
            set_rates(connection, name, given.get("rate_limits", {}))
            after = self._audited(connection, find_row(connection, name))
            record(connection, by, "endpoint.create", name, after=after)
            tell(self._outbox, connection, "rollout.started", name, 1)

        self._store.write(work)
        self._changed()
        return self.get(name)

    def get(self, name: str, caller: Caller = ANONYMOUS) -> dict[str, Any]:
        """Return an endpoint as ``caller`` may see it. Raises ``NotFound``, also if the caller may not see it."""
        if not caller.may_see(name):
            raise NotFound(f"there is no endpoint {name!r}")

        def work(connection: sa.Connection) -> dict[str, Any]:
            there = _there(connection, caller)
            return self._view(connection, find_row(connection, name), caller, there)

        return self._store.read(work)

    def list(self, caller: Caller = ANONYMOUS) -> dict[str, Any]:
        """Return ``{"endpoints": […]}``, sorted by name, with those that ``caller`` may see."""

        def work(connection: sa.Connection) -> dict[str, Any]:
            rows = connection.execute(sa.select(endpoints).order_by(endpoints.c.name)).all()
            there = _there(connection, caller)
            seen = [row for row in rows if caller.may_see(row.name)]
            return {"endpoints": [self._view(connection, row, caller, there) for row in seen]}

        return self._store.read(work)

    def delete(self, name: str, *, by: Actor | None = None) -> None:
        """Delete an endpoint with its configs, tags and limits; its ledger rows stay."""

        def work(connection: sa.Connection) -> None:
            self._store.lock_ledger(connection)
            before = self._audited(connection, find_row(connection, name))
            delete_endpoint(connection, name)
            record(connection, by, "endpoint.delete", name, before=before)

        self._store.write(work)
        self._changed()

    def update_config(self, name: str, body: dict[str, Any], *, by: Actor | None = None) -> dict[str, Any]:
        """Begin an update (``PUT …/{name}/config``). Raises ``Conflict`` while another one runs, ``InvalidField``."""
        config = config_body(body, "")
        if body.get("name") not in (None, name):
            raise InvalidField("name", body["name"], f"{name!r}: an endpoint keeps its name")
        before = self._store.read(lambda connection: _idle_config(connection, name))  # before models are looked up
        config = self._located(config, body, "", before)

        def work(connection: sa.Connection) -> None:
            row = find_row(connection, name)
            _must_be_idle(row)
            self._begin(connection, row, config, by, by_operator=True)

        self._store.write(work)
        self._changed()
        return self.get(name)

    def _begin(
        self,
        connection: sa.Connection,
        row: sa.Row,
        config: EndpointConfig,
        by: Actor | None,
        *,
        by_operator: bool,
        restores: int | None = None,
    ) -> int:
        before = self._audited(connection, row).get("config")
        version = begin_update(connection, row, config, self._now_ms(), by, restores, by_operator=by_operator)
        record(connection, by, "endpoint.update_config", row.name, before=before, after=config_to_wire(config))
        tell(self._outbox, connection, "rollout.started", row.name, version)
        return version

    def history(self, name: str) -> dict[str, Any]:
        """Return ``{"versions": […]}``: every config of an endpoint, the newest first, with who made it and when, what
        became of it, and why if it failed."""

        def work(connection: sa.Connection) -> dict[str, Any]:
            row = find_row(connection, name)
            return {"versions": [config_version(row, found) for found in config_rows(connection, name)]}

        return self._store.read(work)

    def roll_back(self, name: str, body: dict[str, Any], *, by: Actor | None = None) -> dict[str, Any]:
        """Begin an update to a new version that is equal to an earlier one, models included (``POST …/rollback``).

        Without ``config_version``, it is the one that was active last before the present one. Raises ``InvalidField``
        for a version that cannot be served again, ``Conflict`` while an update runs.
        """
        asked = ROLLBACK(body, "").get("config_version")

        def work(connection: sa.Connection) -> None:
            row = find_row(connection, name)
            _must_be_idle(row)
            version = version_to_restore(row, config_rows(connection, name), asked)
            config = stored_config(connection, name, version)[0]
            self._begin(connection, row, config, by, by_operator=True, restores=version)

        self._store.write(work)
        self._changed()
        return self.get(name)

    def declare(self, name: str, config: EndpointConfig, *, by: Actor | None = None) -> int:
        """Make ``name`` serve ``config``, whose sources are known, and return the version of the config that it has.

        This is for the command line. It replaces a config that a command line declared, also one that is in progress.
        What an operator has set stays: ``config`` is only remembered, until ``give_back``.
        """

        def work(connection: sa.Connection) -> int:
            query = sa.select(endpoints).where(endpoints.c.name == name).with_for_update()
            row = connection.execute(query).one_or_none()
            if row is None:
                now = self._now_ms()
                insert_endpoint(self._store, connection, name, config, now, by=by, by_operator=False)
                change_endpoint(connection, name, None, declared=encode_config(config))
                after = self._audited(connection, find_row(connection, name))
                record(connection, by, "endpoint.create", name, after=after)
                tell(self._outbox, connection, "rollout.started", name, 1)
                return 1
            if row.declared is None or not is_same(decode_config(row.declared), config):
                change_endpoint(connection, name, None, declared=encode_config(config))
            version = _newest(row)
            kept = config
            if version is not None:
                kept, there = _present(connection, name, version, config)
                if there or is_operators(connection, name, version):
                    return version
            return self._begin(connection, row, kept, by, by_operator=False)

        try:
            return self._store.write(work)
        except AlreadyExists:  # another gateway that starts at this moment has just declared it
            return self._store.write(work)

    def keeps_operators(self, name: str, config: EndpointConfig) -> bool:
        """Return whether the config of ``name`` is one that an operator has set, and not ``config``."""

        def work(connection: sa.Connection) -> bool:
            version = _newest(find_row(connection, name))
            if version is None or _present(connection, name, version, config)[1]:
                return False
            return is_operators(connection, name, version)

        return self._store.read(work)

    def give_back(self, name: str, *, by: Actor | None = None) -> dict[str, Any]:
        """Give the config back to the command line (``DELETE …/{name}/config``): begin an update to the config that was
        declared last, and let command lines change it again.

        Raises ``Conflict`` while an update runs, and if no command line has declared the endpoint.
        """

        def work(connection: sa.Connection) -> None:
            row = find_row(connection, name)
            _must_be_idle(row)
            if row.declared is None:
                raise Conflict(f"endpoint {name!r} has no config to go back to: no command line has declared it (-m)")
            version, declared = _newest(row), decode_config(row.declared)
            there = False
            if version is not None:
                declared, there = _present(connection, name, version, declared)
            if version is not None and there:
                set_operators(connection, name, version, False)
            else:
                self._begin(connection, row, declared, by, by_operator=False)

        self._store.write(work)
        self._changed()
        return self.get(name)

    def put_rate_limits(self, name: str, body: dict[str, Any], *, by: Actor | None = None) -> dict[str, Any]:
        """Replace the calls per minute of the endpoint and of each of its users (``PUT …/{name}/rate-limits``)."""
        rates = NEW_RATE_LIMITS(body, "").get("rate_limits", {})

        def work(connection: sa.Connection) -> dict[str, Any]:
            find_row(connection, name)
            before = rate_limits_to_wire(connection, name)
            set_rates(connection, name, rates)
            after = rate_limits_to_wire(connection, name)
            record(connection, by, "endpoint.rate_limits", name, before=before, after=after)
            return {"rate_limits": after}

        return self._store.write(work)

    def patch_tags(self, name: str, body: dict[str, Any], *, by: Actor | None = None) -> dict[str, Any]:
        """Apply ``add_tags`` and ``delete_tags`` (``PATCH …/{name}/tags``) and return the resulting tags."""
        change = TAG_CHANGES(body, "")

        def work(connection: sa.Connection) -> dict[str, Any]:
            find_row(connection, name)
            before = tags_to_wire(connection, name)
            set_tags(connection, name, change.get("add_tags", {}), change.get("delete_tags", ()))
            change_endpoint(connection, name, self._now_ms())
            after = tags_to_wire(connection, name)
            record(connection, by, "endpoint.tags", name, before=before, after=after)
            return {"tags": after}

        return self._store.write(work)

    def states(self) -> tuple[EndpointState, ...]:
        """Return the state of every endpoint, sorted by name; cheap enough to call many times a second."""
        fields = [field for field in EndpointState.__struct_fields__ if field != "ready"]
        query = sa.select(*(endpoints.c[field] for field in fields), endpoints.c.ready).order_by(endpoints.c.name)
        found = self._store.read(lambda connection: connection.execute(query).mappings().all())
        return tuple(EndpointState(**{**row, "ready": row["ready"] == "READY"}) for row in found)

    def config(self, name: str, version: int) -> EndpointConfig:
        """Return the stored config ``version``, which never changes."""

        def work(connection: sa.Connection) -> EndpointConfig:
            find_row(connection, name)
            return stored_config(connection, name, version)[0]

        return self._store.read(work)

    def mark_ready(self, name: str, version: int, *, fence: Fence | None = None) -> bool:
        """Record that ``version`` is served now. Return False, and change nothing, if it is not the pending one.

        Raises ``NotLeader`` if ``fence`` is not that of the leader any more, as do ``mark_failed`` and ``set_ready``.
        """

        def work(connection: sa.Connection) -> bool:
            check_fence(connection, fence)
            row = find_row(connection, name)
            if row.config_update != "IN_PROGRESS" or row.pending_version != version:
                return False
            if row.active_version is not None:
                _stop_canary(connection, name, row.active_version, version)
            _, tasks = stored_config(connection, name, version)
            now = {"active_version": version, "pending_version": None, "tasks": " ".join(tasks), "message": ""}
            change_endpoint(connection, name, self._now_ms(), ready="READY", config_update="NOT_UPDATING", **now)
            set_outcome(connection, name, version, "active", served_ms=self._now_ms())
            tell(self._outbox, connection, "rollout.finished", name, version)
            return True

        return self._store.write(work)

    def mark_failed(self, name: str, version: int, message: str, *, fence: Fence | None = None) -> bool:
        """Record that ``version`` cannot be served; the endpoint stays on its active config.

        Return False, and change nothing, if it is not the pending version.
        """

        def work(connection: sa.Connection) -> bool:
            check_fence(connection, fence)
            row = find_row(connection, name)
            if row.config_update != "IN_PROGRESS" or row.pending_version != version:
                return False
            values = {"config_update": "UPDATE_FAILED", "message": message[:MAX_MESSAGE], "pending_version": None}
            change_endpoint(connection, name, self._now_ms(), **values)
            set_outcome(connection, name, version, "failed", message)
            tell(self._outbox, connection, "rollout.failed", name, version)
            return True

        return self._store.write(work)

    def set_ready(self, name: str, ready: bool, *, fence: Fence | None = None) -> None:
        """Record whether the active config is being served at the moment (an engine may die and come back)."""

        def work(connection: sa.Connection) -> None:
            check_fence(connection, fence)
            row = find_row(connection, name)
            if ready and row.active_version is None:
                raise Conflict(f"endpoint {name!r} has no active config to be ready with")
            change_endpoint(connection, name, None, ready="READY" if ready else "NOT_READY")

        self._store.write(work)

    def _located(
        self, config: EndpointConfig, body: dict[str, Any], parent: str, before: EndpointConfig | None = None
    ) -> EndpointConfig:
        """Return ``config`` with its models found; they must all have the same tasks.

        The engines of an endpoint stay off the gateways unless the request says "local": if those of ``before``, the
        present config, are on other hosts, the new ones are placed on joined hosts, and on such that the same runtime
        starts.

        Raises ``InvalidField``, ``NotFound``. Errors name fields in the spelling of ``body``, whose path in the request
        is ``parent``.
        """
        with as_written(body, parent):
            for place, entity in enumerate(config.served_entities):
                check_model(entity, f"served_entities[{place}]", before)
            elsewhere = before is not None and any(entity.is_elsewhere for entity in before.served_entities)
            placement = "hosts" if elsewhere else self._placement
            scales = {one.name: one.scale for one in before.served_entities} if elsewhere and before else {}
            scale = next(filter(None, scales.values()), None) if elsewhere else self._scale
            entities = tuple(_placed(one, placement, scales.get(one.name, scale)) for one in config.served_entities)
            for place, entity in enumerate(entities):
                check_placement(entity, f"served_entities[{place}]")
            found = tuple(
                _with_declared(msgspec.structs.replace(entity, source=source), before)
                for entity, source in zip(entities, self._locate(entities), strict=True)
            )
            _same_tasks(found)
        return msgspec.structs.replace(config, served_entities=found)

    def _view(
        self, connection: sa.Connection, row: sa.Row, caller: Caller, there: tuple[tuple[Gateway, ...], Placed]
    ) -> dict[str, Any]:
        if not caller.manages:
            return endpoint_in_brief(row, caller)
        gateways, placed = there
        configs = {
            version: stored_config(connection, row.name, version)[0]
            for version in (row.active_version, row.pending_version)
            if version is not None
        }
        shown = endpoint_to_wire(connection, row, configs.__getitem__)
        return shown | by_gateway(row, gateways, shown["state"]) | by_host(configs.values(), placed)

    def _audited(self, connection: sa.Connection, row: sa.Row) -> dict[str, Any]:
        """Return what the audit log keeps of an endpoint: what was asked for, without progress; ``config`` is the
        newest."""
        version = _newest(row)
        config = None if version is None else config_to_wire(stored_config(connection, row.name, version)[0])
        shown = {"description": row.description, "config": config, "tags": tags_to_wire(connection, row.name)}
        return shown | {"rate_limits": rate_limits_to_wire(connection, row.name)}

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def _newest(row: sa.Row) -> int | None:
    """Return the version of the config that the endpoint ``row`` has, or is getting; None if its first one failed."""
    version: int | None = row.active_version if row.pending_version is None else row.pending_version
    return version


def _present(connection: sa.Connection, name: str, version: int, config: EndpointConfig) -> tuple[EndpointConfig, bool]:
    """Return ``config`` with the versions of followed aliases that config ``version`` serves, and whether the two are
    then the same; a canary that runs does not count."""
    stored = stored_config(connection, name, version)[0]
    kept = with_sources_of(config, stored)
    return kept, is_same(without_canary(stored), kept)


def _stop_canary(connection: sa.Connection, name: str, active: int, version: int) -> None:
    """Record that config ``version`` of an operator or a command line has ended the canary of the ``active`` one."""
    row = next(row for row in config_rows(connection, name) if row.version == active)
    if row.outcome == "active" and decode_config(row.config).canary is not None:
        set_outcome(connection, name, active, "stopped", f"version {version} took its place")


def _there(connection: sa.Connection, caller: Caller) -> tuple[tuple[Gateway, ...], Placed]:
    """Return the gateways and the joined hosts with what is placed on them, for callers who may see them."""
    return (gateways_in(connection), placed_in(connection)) if caller.manages else ((), Placed())


def _with_declared(entity: EntityConfig, before: EndpointConfig | None) -> EntityConfig:
    """Return ``entity`` with what a command line has said of its model in ``before``, and no request can say."""
    present = () if before is None else before.served_entities
    same = next((one for one in present if one.uri == entity.uri and one.canary_of is None), None)
    if same is None:
        return entity
    source = msgspec.structs.replace(entity.model, core=same.model.core)
    return msgspec.structs.replace(entity, asked=same.asked, source=source)


def _placed(entity: EntityConfig, placement: str, scale: Scale | None) -> EntityConfig:
    """Return an entity for which a request has not said where its engines run, with ``placement`` and ``scale``."""
    if entity.scale is not None and entity.placement is None:
        return msgspec.structs.replace(entity, placement="hosts")
    if placement != "hosts" or entity.placement is not None:
        return entity
    return msgspec.structs.replace(entity, placement="hosts", scale=None if entity.replicas is not None else scale)


def _idle_config(connection: sa.Connection, name: str) -> EndpointConfig | None:
    """Return the active config of an endpoint without an update under way; None if it has none. Raises ``Conflict``."""
    row = find_row(connection, name)
    _must_be_idle(row)
    return None if row.active_version is None else stored_config(connection, name, row.active_version)[0]


def _must_be_idle(row: sa.Row) -> None:
    if row.config_update == "IN_PROGRESS":
        raise Conflict(f"an update of {row.name!r} is in progress; try again when it has ended")


def _same_tasks(entities: tuple[EntityConfig, ...]) -> None:
    first = tasks_of(entities[0])
    for place, entity in enumerate(entities):
        if tasks_of(entity) != first:
            allowed = f"the same tasks as {entities[0].name!r}: {', '.join(first)}"
            raise InvalidField(f"served_entities[{place}]", list(tasks_of(entity)), allowed)
