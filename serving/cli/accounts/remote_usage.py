"""Usage for ``mlflow-llm usage``, read from a server over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from ...http.management.paths import USAGE
from ...metering.accounts.money import micro_units_of
from ...metering.usage.usage import MAX_PAGE, MONEY, GroupBy, UsageFilter, UsageRow, UsageSum
from ..http import Client

T = TypeVar("T")


class RemoteUsage:
    """``metering.usage.Usage`` by a server, as far as the client's key may see. Methods raise ``ClickException``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def currency(self) -> str:
        return str(self._ask(UsageFilter(), limit=1)["currency"])

    def rows(self, what: UsageFilter) -> Iterator[UsageRow]:
        """Yield every matching row, read in pages."""
        cursor: dict[str, str] = {}
        while True:
            page = self._ask(what, limit=MAX_PAGE, **cursor)
            for row in page["usage"]:
                yield _read(row, UsageRow, MONEY)
            if page["next_cursor"] is None:
                return
            cursor = {"cursor": page["next_cursor"]}

    def sums(self, what: UsageFilter, by: tuple[GroupBy, ...]) -> tuple[UsageSum, ...]:
        found = self._ask(what, by=",".join(by))["usage"]
        return tuple(_read(row | {"group": [row[name] for name in by]}, UsageSum, ("cost",)) for row in found)

    def provisioned_cost(self, what: UsageFilter) -> tuple[tuple[str, str, str, int, int], ...]:
        """Return (tenant, endpoint, entity, unit-minutes, micro-units) of provisioned throughput in the filter's
        time."""
        found = self._ask(what, by="tenant")["provisioned"]
        names = ("tenant", "endpoint", "entity", "unit_minutes")
        return tuple((*(row[name] for name in names), micro_units_of(row["cost"])) for row in found)

    def _ask(self, what: UsageFilter, **more: object) -> dict[str, Any]:
        asked = {name: value for name, value in msgspec.structs.asdict(what).items() if value is not None}
        if what.tag is not None:
            asked["tag"] = "=".join(what.tag)
        # nine digits at least, which are milliseconds
        times = {name: f"{asked.pop(f'{name}_ms'):09}" for name in ("start", "end") if f"{name}_ms" in asked}
        found: dict[str, Any] = self._client.get(f"{USAGE}?{urlencode({**asked, **times, **more})}")
        return found


def _read(row: dict[str, Any], kind: type[T], money: tuple[str, ...]) -> T:
    """Return a row of an answer, its amounts in micro-units. Raises ``ValueError``, ``LookupError``."""
    try:
        return msgspec.convert(row | {name: micro_units_of(row[name]) for name in money}, kind)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
