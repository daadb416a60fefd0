"""The profiles that an endpoint may have, by name."""

from __future__ import annotations

from collections.abc import Mapping

from ..tasks.endpoint import DATABRICKS_PAY_PER_TOKEN, DATABRICKS_PROVISIONED, Profile

PROFILES: Mapping[str, Profile] = {
    "open": Profile(),
    "databricks-provisioned": DATABRICKS_PROVISIONED,
    "databricks-pay-per-token": DATABRICKS_PAY_PER_TOKEN,
}
