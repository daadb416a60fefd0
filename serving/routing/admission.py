"""How the requests of a served entity are admitted: its mode, and its profile of allowed fields and limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from ..control.settings import ServerSettings
from ..endpoints.config import EntityConfig
from ..modes import Mode, PayPerToken, Provisioned, Shadowing
from ..modes.provisioned import Measured, reserved_units
from ..tasks.prompt.endpoint import DATABRICKS_PAY_PER_TOKEN, DATABRICKS_PROVISIONED, Profile

PROFILES: Mapping[str, Profile] = {
    "open": Profile(),
    "databricks-provisioned": DATABRICKS_PROVISIONED,
    "databricks-pay-per-token": DATABRICKS_PAY_PER_TOKEN,
}


def profiles_of(settings: ServerSettings) -> Mapping[str, Profile]:
    """Return the profiles that an endpoint may have, by name, with the limits from the server's settings."""
    tokens, size = settings.default_max_tokens, settings.max_reply_bytes
    return {
        name: dataclasses.replace(profile, default_max_tokens=tokens, max_reply_bytes=size)
        for name, profile in PROFILES.items()
    }


def profile_in(mode: Mode | None, profile: Profile) -> Profile:
    """Return ``profile`` with the fields that ``mode`` allows: an entity's mode overrides the server's profile."""
    if mode is None:
        return profile
    takes = mode.profile
    return dataclasses.replace(profile, allow_n=takes.accepts_n, allow_error_behavior=takes.accepts_error_behavior)


def mode_of(entity: EntityConfig, facts: dict[str, Any], ledger: Any, replicas: int = 1) -> Mode | None:
    """Return the mode that admits the requests of ``entity``.

    Without a ledger the mode is None: all requests are admitted and nothing is counted. ``facts`` are those of
    ``Autoscaler.prepare``. A provisioned entity's reserve is the throughput of its ``replicas``; with none running, it
    is that of one replica, because a request starts one.
    """
    if ledger is None:
        return None
    if entity.shadow is not None:
        return Shadowing(ledger)
    if not entity.provisioned:
        return PayPerToken(ledger)
    measured = msgspec.convert(facts, Measured)
    maximum = entity.max_provisioned_throughput or 1
    throughput = reserved_units(measured.tokens_per_second, maximum, max(1, replicas))
    return Provisioned(ledger, throughput=throughput, prompt_weight_milli=measured.prompt_weight_milli)
