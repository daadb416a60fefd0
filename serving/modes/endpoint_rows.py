"""Reading and writing the endpoint tables inside a transaction of ``Endpoints``."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from ..errors import NotFound
from ..metering.tables import endpoint_configs, endpoint_tags, endpoints, limits
from ..request import Task
from .endpoint_config import EndpointConfig


def find_row(connection: sa.Connection, name: str) -> sa.Row:
    query = sa.select(endpoints).where(endpoints.c.name == name)
    if not connection.get_execution_options().get("mlflow_llm_read", False):
        query = query.with_for_update()
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFound(f"there is no endpoint {name!r}")
    return row


def decode_config(text: str) -> EndpointConfig:
    return msgspec.json.decode(text, type=EndpointConfig)


def stored_config(connection: sa.Connection, name: str, version: int) -> tuple[EndpointConfig, tuple[Task, ...]]:
    table = endpoint_configs.c
    query = sa.select(table.config, table.tasks).where(table.name == name, table.version == version)
    text, tasks = connection.execute(query).one()
    return decode_config(text), tuple(tasks.split())


def set_outcome(connection: sa.Connection, name: str, version: int, outcome: str) -> None:
    table = endpoint_configs.c
    this = sa.and_(table.name == name, table.version == version)
    connection.execute(sa.update(endpoint_configs).where(this).values(outcome=outcome))


def set_tags(connection: sa.Connection, name: str, added: dict[str, str], deleted: tuple[str, ...]) -> None:
    gone = [*added, *deleted]
    connection.execute(sa.delete(endpoint_tags).where(endpoint_tags.c.name == name, endpoint_tags.c.key.in_(gone)))
    if added:
        rows = [{"name": name, "key": key, "value": value} for key, value in added.items()]
        connection.execute(sa.insert(endpoint_tags), rows)


def set_rates(connection: sa.Connection, name: str, rates: dict[tuple[str, str], int]) -> None:
    """Windows stay: they are rebuilt from the ledger when they are missing, and are right when they are not."""
    of_calls = sa.and_(limits.c.subject == name, limits.c.kind == "qpm", limits.c.scope.in_(("endpoint", "user")))
    connection.execute(sa.delete(limits).where(of_calls))
    if rates:
        rows = [{"scope": scope, "subject": name, "kind": kind, "value": v} for (scope, kind), v in rates.items()]
        connection.execute(sa.insert(limits), rows)
