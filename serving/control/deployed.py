"""Endpoints whose engines the controller process runs: the step between a configuration and the plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from ..endpoints.config import EndpointConfig, EntityConfig


class DeployedEntity(Struct, frozen=True, kw_only=True):
    """A served entity of a configuration version that the controller process runs.

    ``key`` is the name of its engine in the supervisor; endpoints may share an engine."""

    endpoint: str
    version: int
    config: EntityConfig
    key: str


@dataclass(kw_only=True, slots=True)
class DeployedEndpoint:
    """An endpoint for whose configuration ``version`` the engines run. The keys of ``facts`` are names of served
    entities."""

    name: str
    id: str
    created: int
    version: int
    config: EndpointConfig
    entities: tuple[DeployedEntity, ...]
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
