"""Keys, prices, limits and the ledger, in one SQL store. See docs/metering.md."""

from __future__ import annotations

from .accounts.audit import Actor, Audit, AuditEntry, AuditFilter
from .accounts.authorization import ANONYMOUS, Caller
from .accounts.keys import ApiKey, Keys
from .accounts.limits import Limit, Limits, LimitStatus
from .accounts.money import Price
from .accounts.prices import Prices
from .accounts.provisioned_minutes import ProvisionedMinutes
from .ledger.lease import Bucket, Lease, Reservation
from .ledger.ledger import Ledger
from .store.store import Store
from .usage.usage import Usage, UsageFilter, UsagePage, UsageRow, UsageSum

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
