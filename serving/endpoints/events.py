"""The events of an endpoint that webhooks are told: each begin and end of a rollout."""

from __future__ import annotations

from typing import Literal

import sqlalchemy as sa

from ..metering.store.outbox import EventOutbox
from ..metering.store.tables import endpoint_configs
from .config import EndpointConfig
from .rows import decode_config

RolloutEvent = Literal["rollout.started", "rollout.finished", "rollout.failed", "rollout.rolled_back"]


def tell(outbox: EventOutbox | None, connection: sa.Connection, event: RolloutEvent, name: str, version: int) -> None:
    """Add an event of config ``version`` of an endpoint, in the transaction of what it tells of."""
    if outbox is None:
        return
    table = endpoint_configs
    query = sa.select(table).where(table.c.name == name, table.c.version == version)
    row = connection.execute(query).one()
    data = {"endpoint": name, "config_version": version, "by": row.creator, "message": row.message}
    outbox.put(connection, event, data | {"served_entities": _served(decode_config(row.config))})


def _served(config: EndpointConfig) -> list[dict[str, object]]:
    return [
        {
            "name": entity.name,
            "model": entity.model.identity.label or entity.entity_name,
            "content_hash": entity.model.identity.content_hash,
            "traffic_percentage": config.share(entity.name),
        }
        for entity in config.served_entities
    ]
