"""How many replicas each served entity has, and what is measured of it before it takes requests."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from ..engine.interface import Engine
from ..modes.endpoint_config import ServedEntity
from ..transport.supervisor import EntityStatus


class Served(Struct, frozen=True, kw_only=True):
    """A served entity in its place. ``key`` is its engine's name in the supervisor; endpoints may share an engine."""

    endpoint: str
    version: int
    entity: ServedEntity
    key: str


class Scaler:
    """One in the keeper. Without provisioned throughput an entity has one replica."""

    def prepare(self, served: Served, engine: Engine) -> dict[str, Any]:
        """Once a config's entity is ready: the facts that every worker gets. Raises ``ServingError`` to refuse it.

        Runs on a thread of its own, one entity at a time, and may take seconds; nothing else uses the engine, unless
        another endpoint shares it.
        """
        return {}

    def replicas(
        self, served: Served, facts: dict[str, Any], status: EntityStatus, wanted_at: float | None, now: float
    ) -> int:
        """How many there should be; asked about every second. ``wanted_at``: when a request last found none.

        Both times are seconds since the epoch.
        """
        return 1

    def forget(self, served: Served) -> None:
        """The entity is served no more."""
