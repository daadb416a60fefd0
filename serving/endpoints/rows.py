"""Reading and writing the endpoint tables inside a transaction of ``EndpointStore``."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from ..interface.errors import AlreadyExists, NotFound
from ..interface.request import Task
from ..metering.accounts.audit import Actor
from ..metering.accounts.limits import delete_limits_of_endpoint
from ..metering.store.store import Store
from ..metering.store.tables import endpoint_configs, endpoint_tags, endpoints, limits, payloads
from .config import EndpointConfig, EntityConfig, with_labels

MAX_MESSAGE = 4096


def find_row(connection: sa.Connection, name: str) -> sa.Row:
    """Return the endpoint's row, locked if the transaction may write. Raises ``NotFound``."""
    query = sa.select(endpoints).where(endpoints.c.name == name)
    if not connection.get_execution_options().get("mlflow_llm_read", False):
        query = query.with_for_update()
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFound(f"there is no endpoint {name!r}")
    return row


def must_be_new(connection: sa.Connection, name: str) -> None:
    """Raise ``AlreadyExists`` if there is an endpoint ``name``."""
    if connection.execute(sa.select(endpoints.c.name).where(endpoints.c.name == name)).first() is not None:
        raise AlreadyExists(f"there is an endpoint {name!r} already")


def tasks_of(entity: EntityConfig) -> tuple[Task, ...]:
    """Return the tasks of a served entity whose model was found."""
    return tuple(sorted(entity.model.bundle.tasks))


def insert_endpoint(
    store: Store,
    connection: sa.Connection,
    name: str,
    config: EndpointConfig,
    now_ms: int,
    *,
    by: Actor | None,
    description: str = "",
    by_operator: bool = True,
) -> None:
    """Insert a new endpoint whose first config is pending. Raises ``AlreadyExists``."""
    row: dict[str, str | None] = {"name": name, "id": secrets.token_hex(16), "description": description}
    row |= {"creator": by.name if by else "", "tenant": by.tenant if by else None}
    row |= {"tasks": " ".join(tasks_of(config.served_entities[0])), "message": ""}
    row |= {"ready": "NOT_READY", "config_update": "IN_PROGRESS"}
    new = store.insert(endpoints).values(**row, created_ms=now_ms, updated_ms=now_ms, pending_version=1, last_version=1)
    counted = {"preserve_rowcount": True}  # otherwise psycopg's rowcount is -1 for an INSERT
    if connection.execute(new.on_conflict_do_nothing(), execution_options=counted).rowcount != 1:
        raise AlreadyExists(f"there is an endpoint {name!r} already")
    add_config(connection, name, 1, config, now_ms, by, by_operator=by_operator)


def begin_update(
    connection: sa.Connection,
    row: sa.Row,
    config: EndpointConfig,
    now_ms: int,
    by: Actor | None,
    restores: int | None = None,
    *,
    by_operator: bool = True,
    message: str = "",
) -> int:
    """Make ``config`` the pending config of the endpoint ``row``, and return its version."""
    version: int = row.last_version + 1
    add_config(connection, row.name, version, config, now_ms, by, restores, by_operator=by_operator, message=message)
    values = {"config_update": "IN_PROGRESS", "message": "", "pending_version": version, "last_version": version}
    change_endpoint(connection, row.name, now_ms, **values)
    return version


def add_config(
    connection: sa.Connection,
    name: str,
    version: int,
    config: EndpointConfig,
    now_ms: int,
    by: Actor | None,
    restores: int | None = None,
    *,
    by_operator: bool,
    outcome: str = "pending",
    message: str = "",
) -> None:
    """Insert a version of an endpoint's config; ``message`` says why there is it."""
    row = {"name": name, "version": version, "config": encode_config(config), "by_operator": by_operator}
    row |= {"tasks": " ".join(tasks_of(config.served_entities[0])), "created_ms": now_ms, "outcome": outcome}
    row |= {"creator": by.name if by else "", "message": message[:MAX_MESSAGE], "restores": restores}
    connection.execute(sa.insert(endpoint_configs).values(row))


def change_endpoint(connection: sa.Connection, name: str, now_ms: int | None, **values: Any) -> None:
    """Change an endpoint's row. ``now_ms`` is the time of a user's change; None for changes by the system."""
    if now_ms is not None:
        values["updated_ms"] = now_ms
    connection.execute(sa.update(endpoints).where(endpoints.c.name == name).values(**values))


def delete_endpoint(connection: sa.Connection, name: str) -> None:
    """Delete an endpoint with its configs, tags, logged texts, limits and the windows counted towards them."""
    delete_limits_of_endpoint(connection, name)
    connection.execute(sa.delete(payloads).where(payloads.c.endpoint == name))
    connection.execute(sa.delete(endpoints).where(endpoints.c.name == name))


def is_operators(connection: sa.Connection, name: str, version: int) -> bool:
    """Return whether an operator has set the config ``version``, not a command line."""
    table = endpoint_configs.c
    query = sa.select(table.by_operator).where(table.name == name, table.version == version)
    return bool(connection.execute(query).scalar_one())


def set_operators(connection: sa.Connection, name: str, version: int, by_operator: bool) -> None:
    """Record whether the config ``version`` is an operator's, which no command line replaces."""
    table = endpoint_configs.c
    this = sa.and_(table.name == name, table.version == version)
    connection.execute(sa.update(endpoint_configs).where(this).values(by_operator=by_operator))


def encode_config(config: EndpointConfig) -> str:
    return msgspec.json.encode(config).decode()


def content_hash(config: EndpointConfig) -> str:
    """Return the hash by which gateways are seen to serve the same config."""
    return hashlib.sha256(encode_config(config).encode()).hexdigest()[:16]


def decode_config(text: str) -> EndpointConfig:
    """Return a stored config, also one of an earlier release."""
    return with_labels(msgspec.json.decode(text, type=EndpointConfig))


def stored_config(connection: sa.Connection, name: str, version: int) -> tuple[EndpointConfig, tuple[Task, ...]]:
    """Return an existing config and the tasks of its entities."""
    table = endpoint_configs.c
    query = sa.select(table.config, table.tasks).where(table.name == name, table.version == version)
    text, tasks = connection.execute(query).one()
    return decode_config(text), tuple(tasks.split())


def set_outcome(
    connection: sa.Connection,
    name: str,
    version: int,
    outcome: str,
    message: str | None = None,
    *,
    served_ms: int | None = None,
) -> None:
    """Record the outcome of the config ``version``, such as "active" or "failed", and why, unless ``message`` is None;
    ``served_ms`` is when it became the active one."""
    table = endpoint_configs.c
    this = sa.and_(table.name == name, table.version == version)
    values: dict[str, Any] = {"outcome": outcome}
    values |= {} if message is None else {"message": message[:MAX_MESSAGE]}
    values |= {} if served_ms is None else {"served_ms": served_ms}
    connection.execute(sa.update(endpoint_configs).where(this).values(**values))


def config_rows(connection: sa.Connection, name: str) -> Sequence[sa.Row]:
    """Return every config of an endpoint, the newest first."""
    table = endpoint_configs
    return connection.execute(sa.select(table).where(table.c.name == name).order_by(table.c.version.desc())).all()


def set_tags(connection: sa.Connection, name: str, added: dict[str, str], deleted: tuple[str, ...]) -> None:
    """Add or replace ``added``, and remove ``deleted``; an unknown key is no error."""
    gone = [*added, *deleted]
    connection.execute(sa.delete(endpoint_tags).where(endpoint_tags.c.name == name, endpoint_tags.c.key.in_(gone)))
    if added:
        rows = [{"name": name, "key": key, "value": value} for key, value in added.items()]
        connection.execute(sa.insert(endpoint_tags), rows)


def set_rates(connection: sa.Connection, name: str, rates: dict[tuple[str, str], int]) -> None:
    """Replace the limits on calls per minute of the endpoint and of its users.

    A soft one, which this form cannot say, stays unless a limit takes its place. The windows stay: existing ones are
    correct, and missing ones are rebuilt from the ledger.
    """
    of_calls = sa.and_(limits.c.subject == name, limits.c.kind == "qpm", limits.c.scope.in_(("endpoint", "user")))
    given = limits.c.scope.in_([scope for scope, _ in rates])
    connection.execute(sa.delete(limits).where(of_calls, sa.or_(~limits.c.soft, given)))
    if rates:
        rows = [{"scope": scope, "subject": name, "kind": kind, "value": v} for (scope, kind), v in rates.items()]
        connection.execute(sa.insert(limits), rows)
