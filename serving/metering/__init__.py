"""Keys, prices, limits and the ledger, in one SQL store. See docs/metering.md."""

from __future__ import annotations

from .audit import Actor, Audit, AuditEntry, AuditFilter
from .caller import ANONYMOUS, Caller
from .keys import ApiKey, Keys
from .lease import Bucket, Lease, Reservation
from .ledger import Ledger
from .limits import Limit, Limits, LimitStatus
from .minutes import Minutes
from .money import Price
from .prices import Prices
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
    "Minutes",
    "Price",
    "Prices",
    "Reservation",
    "Store",
    "Usage",
    "UsageFilter",
    "UsagePage",
    "UsageRow",
    "UsageSum",
]
