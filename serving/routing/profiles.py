"""The profiles that an endpoint may have, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..control.settings import ServerSettings
from ..modes import Mode
from ..tasks.endpoint import DATABRICKS_PAY_PER_TOKEN, DATABRICKS_PROVISIONED, Profile

PROFILES: Mapping[str, Profile] = {
    "open": Profile(),
    "databricks-provisioned": DATABRICKS_PROVISIONED,
    "databricks-pay-per-token": DATABRICKS_PAY_PER_TOKEN,
}


def profiles_of(settings: ServerSettings) -> Mapping[str, Profile]:
    """``PROFILES`` with the limits of a server."""
    tokens, size = settings.default_max_tokens, settings.max_reply_bytes
    return {
        name: dataclasses.replace(profile, default_max_tokens=tokens, max_reply_bytes=size)
        for name, profile in PROFILES.items()
    }


def profile_in(mode: Mode | None, profile: Profile) -> Profile:
    """``profile`` with the fields that the mode takes: an entity's mode decides, whatever its server's profile is."""
    if mode is None:
        return profile
    takes = mode.profile
    return dataclasses.replace(profile, allow_n=takes.accepts_n, allow_error_behavior=takes.accepts_error_behavior)
