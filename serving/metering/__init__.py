"""Keys, prices, limits and the ledger, in one SQL store. See docs/metering.md."""

from __future__ import annotations

from .audit import Actor, Audit, AuditEntry, AuditFilter
from .authorization import ANONYMOUS, Caller
from .keys import ApiKey, Keys
from .lease import Bucket, Lease, Reservation
from .ledger import Ledger
from .limits import Limit, Limits, LimitStatus
from .money import Price
from .prices import Prices
from .provisioned_minutes import ProvisionedMinutes
from .store import Store
from .usage import Usage, UsageFilter, UsagePage, UsageRow, UsageSum

__all__ = [
    "ANONYMOUS",
    "Actor",
    "ApiKey",
    "Audit",
    "AuditEntry",
    "AuditFilter",
    "Bucket",
    "Caller",
    "Keys",
    "Lease",
    "Ledger",
    "Limit",
    "LimitStatus",
    "Limits",
    "Price",
    "Prices",
    "ProvisionedMinutes",
    "Reservation",
    "Store",
    "Usage",
    "UsageFilter",
    "UsagePage",
    "UsageRow",
    "UsageSum",
]
