"""Which mode admits the requests of a served entity."""

from __future__ import annotations

from typing import Any

import msgspec

from ..endpoints.config import EntityConfig
from ..modes import Mode, PayPerToken, Provisioned
from ..modes.provisioned import Measured, reserved_units


def mode_of(entity: EntityConfig, facts: dict[str, Any], ledger: Any, replicas: int = 1) -> Mode | None:
    """``facts`` are those of ``Autoscaler.prepare``. None without a ledger: everything is admitted and nothing counted.

    A provisioned entity's reserve is what its ``replicas`` give; while it has none and a request makes it start, one.
    """
    if ledger is None:
        return None
    if not entity.provisioned:
        return PayPerToken(ledger)
    measured = msgspec.convert(facts, Measured)
    maximum = entity.max_provisioned_throughput or 1
    throughput = reserved_units(measured.tokens_per_second, maximum, max(1, replicas))
    return Provisioned(ledger, throughput=throughput, prompt_weight_milli=measured.prompt_weight_milli)
