"""Which mode admits the requests of a served entity."""

from __future__ import annotations

from typing import Any

from ..modes import Mode, PayPerToken, Provisioned
from ..modes.endpoint_config import ServedEntity


def mode_of(entity: ServedEntity, facts: dict[str, Any], ledger: Any) -> Mode | None:
    """``facts`` are those of ``Scaler.prepare``. None without a ledger: everything is admitted and nothing counted."""
    if ledger is None:
        return None
    if not entity.provisioned:
        return PayPerToken(ledger)
    throughput = entity.min_provisioned_throughput or entity.max_provisioned_throughput or 1
    return Provisioned(ledger, throughput=throughput, prompt_weight_milli=int(facts.get("prompt_weight_milli", 1000)))
