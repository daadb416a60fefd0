"""The invariants of a schedule: after each step, and when all has healed.

The ledger's rows are read past the product's code, and compared with what the requests themselves know, with the
windows, and with the limits in force.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping

import sqlalchemy as sa

from ...metering.accounts import windows
from ...metering.accounts.limits import Limit, Subject, rebuilt, subjects_of
from ...metering.accounts.windows import BUDGETS, DAY_SECONDS, KINDS, SLOTS_BEFORE, month_of
from ...metering.proof.chain_check import check as check_chain
from ...metering.store.tables import limits as limits_table
from ...metering.store.tables import windows as windows_table
from .database import Database
from .gateway import Request

EXACT = ("ok", "error", "aborted")
_FIXED = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost", "status", "ended_ms", "finish_reason")


class Violation(AssertionError):
    """A broken invariant."""


def require(holds: object, message: str) -> None:
    if not holds:
        raise Violation(message)


class Invariants:
    """The invariants of one schedule. ``requests`` are all that were sent, by id."""

    def __init__(self, database: Database, requests: Mapping[str, Request]) -> None:
        self._database = database
        self._requests = requests
        self._rows: dict[str, sqlite3.Row] = {}
        self._version = 0

    def after_step(self) -> None:
        """Check what a commit may have changed. Raises ``Violation``."""
        if self._database.version == self._version:
            return
        self._version = self._database.version
        rows = {row["request_id"]: row for row in self._database.query("SELECT * FROM ledger")}
        for request_id, row in rows.items():
            before = self._rows.get(request_id)
            if before is None or tuple(before) != tuple(row):
                self._check_change(before, row)
                self._check_counts(row)
        gone = self._rows.keys() - rows.keys()
        require(not gone, f"rows are gone: {sorted(gone)}")
        new = [row for request_id, row in rows.items() if request_id not in self._rows]
        self._check_windows()
        for row in new:
            self._check_limits(row, rows.values())
        self._rows = rows

    def _check_change(self, before: sqlite3.Row | None, row: sqlite3.Row) -> None:
        name, status = row["request_id"], row["status"]
        require(name in self._requests, f"{name}: nobody sent this request")
        if before is None:
            require(status == "open", f"{name}: a row begins as {status}")
            return
        was = before["status"]
        if was in EXACT:
            require(all(before[name] == row[name] for name in _FIXED), f"{name}: it ended twice, {was} and {status}")
        if was == "recovered":
            require(status != "open", f"{name}: a row was opened again")
        if was == "recovered" == status:
            require(row["completion_tokens"] >= before["completion_tokens"], f"{name}: a recovered count fell")

    def _check_counts(self, row: sqlite3.Row) -> None:
        request = self._requests[row["request_id"]]
        billed = row["completion_tokens"]
        require(
            billed <= request.counted,
            f"{request.request_id}: {billed} tokens are billed, {request.counted} came ({row['status']})",
        )
        if row["status"] in EXACT:
            require(
                billed >= request.received,
                f"{request.request_id}: {billed} tokens are billed, {request.received} were received",
            )

    def _check_windows(self) -> None:
        self._database.store.read(_compare_windows)

    def _check_limits(self, row: sqlite3.Row, rows: Iterable[sqlite3.Row]) -> None:
        """Check that the limits had room for a row that was just admitted."""
        columns = [limits_table.c[name] for name in ("scope", "subject", "kind", "value")]
        hard = sa.select(*columns).where(~limits_table.c.soft)
        found = self._database.store.read(lambda connection: connection.execute(hard).all())
        subjects: dict[str, Subject] = dict(
            zip(("endpoint", "key", "tenant", "user"), subjects_of(_strings(row)), strict=True)
        )
        for scope, subject, kind, value in found:
            limit = Limit(scope=scope, subject=subject, kind=kind, value=value)
            named = row["endpoint"] if scope == "user" else subjects[scope][1]
            if named == subject:
                of_subject = [one for one in rows if subjects[scope] in subjects_of(_strings(one))]
                used = sum(_amount(one, limit, row["charged_at"]) for one in of_subject)
                wants = _amount(row, limit, row["charged_at"])
                require(
                    used <= value or not wants, f"{row['request_id']}: {kind} of {scope} {subject}: {used} > {value}"
                )

    def at_end(self) -> None:
        """Check, when every process could do its upkeep, that each request has ended as it must. Raises
        ``Violation``."""
        self.after_step()
        for request in self._requests.values():
            row = self._rows.get(request.request_id)
            if request.outcome in ("refused", "failed", "asked"):
                require(
                    row is None or _is_unused(row), f"{request.request_id}: {request.outcome}, and billed {_told(row)}"
                )
                require(
                    row is None or request.outcome != "refused", f"{request.request_id}: refused, and in the ledger"
                )
                continue
            require(row is not None, f"{request.request_id}: the row of an admitted request is missing")
            assert row is not None
            self._check_end(request, row)
        chain = check_chain(self._database.store)
        require(not chain.num_problems, f"the chain: {chain.problems}")
        require(chain.rows == len(self._rows), f"the chain has {chain.rows} of {len(self._rows)} rows")

    def _check_end(self, request: Request, row: sqlite3.Row) -> None:
        name, told = request.request_id, _told(row)
        require(row["status"] != "open", f"{name}: it never ended")
        if request.settled and not request.in_memory:
            require(row["status"] == request.status, f"{name}: settled as {request.status}, and it is {told}")
        if request.settled or not request.power_lost:
            exact = row["completion_tokens"] == request.counted
            require(
                exact or (request.in_memory and request.power_lost), f"{name}: {request.counted} came, and it is {told}"
            )
        require(row["generated_tokens"] >= row["completion_tokens"], f"{name}: more billed than generated, {told}")
        if not request.power_lost:
            generated = row["generated_tokens"]
            require(generated == request.generated, f"{name}: engines made {request.generated}, and it is {told}")


def _compare_windows(connection: sa.Connection) -> None:
    columns = (windows_table.c.scope, windows_table.c.subject, windows_table.c.state)
    for scope, subject, stored in connection.execute(sa.select(*columns)).all():
        state, expected = windows.decode(stored), rebuilt(connection, (scope, subject))
        now = max(state.latest, expected.latest)
        for kind in KINDS:
            have, want = windows.used(state, kind, now), windows.used(expected, kind, now)
            require(have == want, f"{scope} {subject!r} {kind}: the window says {have}, the rows {want}")


def _strings(row: sqlite3.Row) -> dict[str, str]:
    return {name: row[name] for name in ("endpoint", "key_id", "tenant")}


def _amount(row: sqlite3.Row, limit: Limit, now: int) -> int:
    """Return what a row counts against a limit at second ``now``."""
    is_open, at, kind = row["status"] == "open", row["charged_at"], limit.kind
    if kind == "in_flight":
        return int(is_open)
    if kind in BUDGETS:
        same = {
            "budget": True,
            "budget_day": at // DAY_SECONDS == now // DAY_SECONDS,
            "budget_month": month_of(at) == month_of(now),
        }
        return (row["reserved_cost"] if is_open else row["cost"]) if same[kind] else 0
    slot = 60 if kind == "qph" else 1
    if at // slot < now // slot - SLOTS_BEFORE:
        return 0
    if kind == "itpm":
        return int(row["reserved_input"] if is_open else row["prompt_tokens"])
    if kind == "otpm":
        return int(row["reserved_output"] if is_open else row["completion_tokens"])
    return 1


def _is_unused(row: sqlite3.Row) -> bool:
    return row["status"] != "open" and not (row["prompt_tokens"] or row["completion_tokens"] or row["cost"])


def _told(row: sqlite3.Row | None) -> str:
    if row is None:
        return "nothing"
    counts = f"{row['prompt_tokens']}+{row['completion_tokens']} tokens, {row['generated_tokens']} generated"
    return f"{row['status']} with {counts}"
