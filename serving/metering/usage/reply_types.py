"""Usage as the management API returns it, as types: the OpenAPI document has their schemas."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from msgspec import Meta

from ...interface.payload_log import PayloadCode
from ...interface.type_schema import fields, form, sent_form
from .payloads import Payload
from .usage import GROUPS, MONEY, UsageRow, UsageSum

Money = Annotated[str, Meta(description="a decimal number, in currency units")]
UsageRowInfo = sent_form(
    "UsageRowInfo",
    "A request. Its money is in decimal strings; an open row has the counts of its last checkpoint.",
    UsageRow,
    **dict.fromkeys(MONEY, Money),
)
UsageSumInfo = form(
    "UsageSumInfo",
    "The sum of a group of requests; columns that were not grouped by are left out.",
    {
        **dict.fromkeys(GROUPS, NotRequired[str | None]),
        **{name: int for name in UsageSum.__struct_fields__ if name not in ("group", "cost")},
        "cost": Money,
    },
)


RECENT_FIELDS = (
    "request_id", "key_id", "tenant", "endpoint", "entity", "adapter", "task", "status", "finish_reason",
    "prompt_tokens", "cached_tokens", "completion_tokens", "started_ms", "ended_ms",
)  # fmt: skip
RecentRequest = form(
    "RecentRequest",
    "A request without its texts; a running one has the counts of its last checkpoint. `has_payload` says whether the "
    "payload log has its texts.",
    {name: kind for name, kind in fields(UsageRow).items() if name in RECENT_FIELDS} | {"has_payload": bool},
)


class RecentRequests(TypedDict):
    """The newest requests, and the ledger's time."""

    now_ms: int
    requests: list[RecentRequest]  # type: ignore[valid-type]


PayloadInfo = sent_form(
    "PayloadInfo",
    "A request with its texts, as JSON. `codes` says why a text was left out; `sample` is the share that was logged.",
    Payload,
    codes=list[PayloadCode],
)


class PayloadPage(TypedDict):
    """A page of requests, the newest first. A ``next_cursor`` of null means that this is the last page."""

    payloads: list[PayloadInfo]  # type: ignore[valid-type]
    next_cursor: str | None


class DeletedPayloads(TypedDict):
    """The number of requests whose texts were deleted."""

    deleted: int


class ReservedInfo(TypedDict):
    """Provisioned throughput, in tokens/s times minutes."""

    tenant: str
    endpoint: str
    entity: str
    unit_minutes: int
    cost: Money


class UsagePageInfo(TypedDict):
    """A page of rows, oldest first. A ``next_cursor`` of null means that this is the last page so far."""

    currency: str
    usage: list[UsageRowInfo]  # type: ignore[valid-type]
    next_cursor: str | None


class Bill(TypedDict):
    """The sums by the columns of ``by``, and reserved throughput."""

    currency: str
    usage: list[UsageSumInfo]  # type: ignore[valid-type]
    provisioned: list[ReservedInfo]
