"""Keys, prices, limits and the ledger, in one SQL store. See docs/metering.md."""

from __future__ import annotations

from .keys import ANONYMOUS, ApiKey, Caller, Keys
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
    "ApiKey",
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
