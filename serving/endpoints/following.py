"""The records of endpoints that follow an alias, written by the leader of the gateways: rollouts, canaries, their ends.

::

    the alias moves ──► a config with a canary ──► promoted     a config with the new version follows
                                 │ └─────────────► rolled_back  a config equal to the one before follows
                                 └───────────────► stopped      by an update, or a further move of the alias

A version that an alias means is acted upon once: it is remembered as ``seen`` until the alias means another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import sqlalchemy as sa
from msgspec import Struct

from ..metering.accounts.audit import Actor, record
from ..metering.store.outbox import EventOutbox
from ..metering.store.store import Store
from ..metering.store.tables import endpoint_configs, endpoints, followed_aliases
from .config import EndpointConfig, config_to_wire, is_same
from .events import tell
from .gateways import Fence, check_fence
from .rows import (
    MAX_MESSAGE,
    add_config,
    begin_update,
    change_endpoint,
    config_rows,
    decode_config,
    find_row,
    is_operators,
    set_outcome,
    stored_config,
)

ACTOR = Actor(name="follow_alias", via="server")
Ended = Literal["promoted", "rolled_back", "stopped"]


class Step(Struct, frozen=True, kw_only=True):
    """A change of an endpoint by its alias. It is made only if config ``version`` is still the active one.

    ``entity`` is the name of the entity that follows, ``seen`` the URI of the version that its alias means. The
    endpoint gets ``config``, if there is one, and ``message`` says why. The active config, which has a canary, has
    ``ended`` then because of ``reason``. With ``refused``, ``config`` is only recorded, as rolled back at once.
    """

    endpoint: str
    version: int
    entity: str
    seen: str
    config: EndpointConfig | None = None
    message: str = ""
    ended: Ended | None = None
    reason: str = ""
    refused: bool = False


class Following:
    """The followed aliases of a store. Methods raise ``NotFound`` for an unknown endpoint, and ``NotLeader``."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float],
        changed: Callable[[], None] = lambda: None,
        outbox: EventOutbox | None = None,
    ) -> None:
        self._store, self._clock, self._changed, self._outbox = store, clock, changed, outbox

    def seen(self) -> dict[tuple[str, str], str]:
        """Return the URI of the version that each alias meant when it was last acted upon, by endpoint and entity."""
        query = sa.select(followed_aliases)
        found = self._store.read(lambda connection: connection.execute(query).all())
        return {(row.name, row.entity): row.seen for row in found}

    def served_seconds(self, name: str, version: int) -> float:
        """Return for how many seconds config ``version`` has been the active one."""
        table = endpoint_configs.c
        query = sa.select(table.served_ms).where(table.name == name, table.version == version)
        since = self._store.read(lambda connection: connection.execute(query).scalar_one_or_none())
        return 0.0 if since is None else max(0.0, self._clock() - since / 1000)

    def take(self, step: Step, *, fence: Fence | None = None) -> bool:
        """Make a change. Return False, and change nothing, if an update runs or another config is active."""

        def work(connection: sa.Connection) -> bool:
            check_fence(connection, fence)
            row = find_row(connection, step.endpoint)
            if row.config_update == "IN_PROGRESS" or row.active_version != step.version:
                return False
            self._remember(connection, step)
            if step.ended is not None:
                set_outcome(connection, step.endpoint, step.version, step.ended, step.reason)
            if step.ended == "rolled_back":
                tell(self._outbox, connection, "rollout.rolled_back", step.endpoint, step.version)
            if step.config is not None:
                self._set(connection, row, step, step.config)
            return True

        done = self._store.write(work)
        if done:
            self._changed()
        return done

    def _remember(self, connection: sa.Connection, step: Step) -> None:
        keys = {"name": step.endpoint, "entity": step.entity}
        new = self._store.insert(followed_aliases).values(**keys, seen=step.seen)
        connection.execute(new.on_conflict_do_update(index_elements=list(keys), set_={"seen": step.seen}))

    def _set(self, connection: sa.Connection, row: sa.Row, step: Step, config: EndpointConfig) -> None:
        name, now_ms = step.endpoint, int(self._clock() * 1000)
        owned = is_operators(connection, name, step.version)
        if step.refused:
            version = row.last_version + 1
            options = {"outcome": "rolled_back", "message": step.message, "by_operator": owned}
            add_config(connection, name, version, config, now_ms, ACTOR, **options)  # type: ignore[arg-type]
            change_endpoint(connection, name, now_ms, last_version=version)
            tell(self._outbox, connection, "rollout.rolled_back", name, version)
            return
        rows = [one for one in config_rows(connection, name) if one.outcome == "active" and one.version < step.version]
        equal = (one.version for one in rows if is_same(decode_config(one.config), config))
        restores = next(equal, None) if step.ended == "rolled_back" else None
        before = config_to_wire(stored_config(connection, name, step.version)[0])
        options = {"by_operator": owned, "message": step.message}
        version = begin_update(connection, row, config, now_ms, ACTOR, restores, **options)  # type: ignore[arg-type]
        tell(self._outbox, connection, "rollout.started", name, version)
        record(connection, ACTOR, "endpoint.update_config", name, before=before, after=config_to_wire(config))

    def fail(self, name: str, version: int, message: str, *, fence: Fence | None = None) -> None:
        """Record that the endpoint stays on config ``version`` because the version of its alias cannot be served."""

        def work(connection: sa.Connection) -> None:
            check_fence(connection, fence)
            idle = sa.and_(endpoints.c.name == name, endpoints.c.active_version == version)
            idle = sa.and_(idle, endpoints.c.config_update != "IN_PROGRESS")
            values = {"config_update": "UPDATE_FAILED", "message": message[:MAX_MESSAGE]}
            connection.execute(sa.update(endpoints).where(idle).values(**values))

        self._store.write(work)
