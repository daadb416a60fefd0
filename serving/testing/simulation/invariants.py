"""The invariants of a schedule: after each step, and when all has healed.

The ledger's rows are read past the product's code, and compared with what the requests themselves know, with the
windows, and with the limits in force.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

from ...metering.accounts import windows
from ...metering.accounts.limits import Limit, Subject, subjects_of
from ...metering.accounts.windows import (
    BUDGETS,
    DAY_SECONDS,
    KINDS,
    RATES,
    SLOTS_BEFORE,
    Amounts,
    Kind,
    WindowState,
    month_of,
)
from ...metering.proof.chain_check import check as check_chain
from .database import Database
from .gateway import Request

SoftLimit: TypeAlias = tuple[str, str, str]
"""The scope, subject and kind of a soft limit."""
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
        self._soft: dict[str, tuple[set[SoftLimit], set[SoftLimit]]] = {}
        """The soft limits that a request surely goes beyond, and those that it may go beyond."""
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
        is_lent = self._compare_windows(rows.values())
        for row in new:
            self._check_limits(row, rows.values(), self._rows.keys(), is_lent=is_lent)
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

    def _compare_windows(self, rows: Collection[sqlite3.Row]) -> bool:
        """Compare each window with its rows, of which it may lack what slices cover; return whether something is
        lent."""
        is_lent = False
        for found in self._database.query("SELECT scope, subject, state FROM windows"):
            scope, subject, state = found["scope"], found["subject"], windows.decode(found["state"])
            expected = WindowState()
            for row in sorted(rows, key=lambda row: row["charged_at"]):
                if (scope, subject) in subjects_of(_strings(row)):
                    windows.charge(expected, row["charged_at"], _counted(row))
            now = max(state.latest, expected.latest)
            is_lent = is_lent or bool(state.lent)
            for kind in KINDS:
                have, want = windows.used(state, kind, now), windows.used(expected, kind, now)
                lent = windows.lent(state, kind)
                is_covered = state.lent and want <= have + lent
                told = f"the window says {have}, the rows {want}, {lent} are lent"
                require(have == want or is_covered, f"{scope} {subject!r} {kind}: {told}")
        return is_lent

    def _check_limits(
        self, row: sqlite3.Row, rows: Iterable[sqlite3.Row], before: Collection[str], *, is_lent: bool
    ) -> None:
        """Check that the limits had room for a row that was just admitted, and note which soft ones had none.

        ``before`` are the rows that there were before its transaction. What ``is_lent`` counts as used by a soft limit.
        """
        found = self._database.query("SELECT scope, subject, kind, value, soft FROM limits")
        surely, maybe = self._soft[row["request_id"]] = (set(), set())
        subjects: dict[str, Subject] = dict(
            zip(("endpoint", "key", "tenant", "user"), subjects_of(_strings(row)), strict=True)
        )
        for scope, subject, kind, value, soft in found:
            limit = Limit(scope=scope, subject=subject, kind=kind, value=value)
            named = row["endpoint"] if scope == "user" else subjects[scope][1]
            wants = _amount(row, limit, row["charged_at"])
            if named != subject or not wants:
                continue
            of_subject = [one for one in rows if subjects[scope] in subjects_of(_strings(one))]
            if soft:
                others = [one for one in of_subject if one["request_id"] in before]
                if sum(_amount(one, limit, row["charged_at"]) for one in others) + wants > value:
                    surely.add((scope, subject, kind))
                if is_lent or sum(_amount(one, limit, row["charged_at"]) for one in of_subject) > value:
                    maybe.add((scope, subject, kind))
                continue
            for at in _ends(limit, row["charged_at"], of_subject):
                used = sum(_amount(one, limit, at) for one in of_subject)
                require(used <= value, f"{row['request_id']}: {kind} of {scope} {subject}: {used} > {value}")

    def abandoned(self, living: Collection[str], now: float) -> list[tuple[str, str]]:
        """Return (key, tenant) of a request for each window whose slices have ended: it builds the window anew.

        Raises ``Violation`` if something is lent to a holder that does not live.
        """
        asking = set()
        for row in self._database.query("SELECT scope, subject, state FROM windows"):
            scope, subject = row["scope"], row["subject"]
            for holder, lent in windows.decode(row["state"]).lent.items():
                require(holder in living or lent.until < now, f"{scope} {subject!r}: lent to {holder}, which is gone")
                if lent.until < now:
                    key_id = subject.rpartition("\n")[2] if scope in ("key", "user") else "key_0"
                    asking.add((key_id, subject if scope == "tenant" else "acme"))
        return sorted(asking)

    def at_end(self, *, can_repeat: bool) -> None:
        """Check, when every process could do its upkeep and has ended, that each request has ended as it must, and
        nothing is lent. ``can_repeat``: an admission may have been found in the ledger after its answer was lost, which
        says nothing of soft limits. Raises ``Violation``."""
        self.after_step()
        require(not self._compare_windows(self._rows.values()), "something is lent, and nobody lives")
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
            surely, maybe = self._soft[request.request_id]
            told = f"{request.request_id}: it goes beyond {sorted(surely)}, and its admission says"
            require(can_repeat or surely <= request.beyond, f"{told} {sorted(request.beyond)}")
            require(request.beyond <= maybe, f"{told} {sorted(request.beyond)}")
            self._check_end(request, row)
        chain = check_chain(self._database.store)
        require(not chain.num_problems, f"the chain: {chain.problems}")
        require(chain.rows == len(self._rows), f"the chain has {chain.rows} of {len(self._rows)} rows")

    def _check_end(self, request: Request, row: sqlite3.Row) -> None:
        name, told = request.request_id, _told(row)
        require(row["status"] != "open", f"{name}: it never ended")
        if request.settled and not request.in_memory and not (request.unsynced and request.power_lost):
            require(row["status"] == request.status, f"{name}: settled as {request.status}, and it is {told}")
        if request.settled or not request.power_lost:
            exact = row["completion_tokens"] == request.counted
            is_lost = request.power_lost and (request.in_memory or request.unsynced)
            require(exact or is_lost, f"{name}: {request.counted} came, and it is {told}")
        require(row["generated_tokens"] >= row["completion_tokens"], f"{name}: more billed than generated, {told}")
        if not request.power_lost:
            generated = row["generated_tokens"]
            require(generated == request.generated, f"{name}: engines made {request.generated}, and it is {told}")


def _counted(row: sqlite3.Row) -> Amounts:
    """Return what a row counts in its windows."""
    if row["status"] == "open":
        return Amounts(
            input=row["reserved_input"],
            output=row["reserved_output"],
            queries=1,
            in_flight=1,
            money=row["reserved_cost"],
        )
    return Amounts(input=row["prompt_tokens"], output=row["completion_tokens"], queries=1, money=row["cost"])


def _ends(limit: Limit, at: int, rows: Iterable[sqlite3.Row]) -> set[int]:
    """Return the seconds at which intervals end that a row of second ``at`` can have filled."""
    if limit.kind not in RATES:
        return {at}
    last = (at // _slot_seconds(limit.kind) + SLOTS_BEFORE) * _slot_seconds(limit.kind) + _slot_seconds(limit.kind) - 1
    return {at, *(row["charged_at"] for row in rows if at < row["charged_at"] <= last)}


def _slot_seconds(kind: Kind) -> int:
    return 60 if kind == "qph" else 1


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
    slot = _slot_seconds(kind)
    if not now // slot - SLOTS_BEFORE <= at // slot <= now // slot:
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
