"""Rate windows: an exact sliding-window counter in O(1) space and time, without a store or a clock of its own.

A window is a row of slots. Minute windows (``itpm``, ``otpm``, ``qpm``) have slots of 1 s; the hour window (``qph``)
has slots of 60 s. Each keeps the current slot and the 60 before it::

    slot    s-60  s-59  …  s-1   s        61 slots, the last one still filling
            └──────── sum ≤ limit ────┘   checked before anything is added to slot s

Any 60 s (3,600 s) that end inside slot s lie within these 61 slots. The limit is therefore not exceeded, not even by
one token, in *any* window of that length, wherever it begins. The price is that a token leaves the window up to one
slot late. Output is charged when it is reserved, in the slot of the admission; the unused part is credited back to that
slot.
"""

from __future__ import annotations

import datetime
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

Kind: TypeAlias = Literal["itpm", "otpm", "qpm", "qph", "in_flight", "budget", "budget_day", "budget_month"]
KINDS: tuple[Kind, ...] = ("itpm", "otpm", "qpm", "qph", "in_flight", "budget", "budget_day", "budget_month")
BUDGETS: tuple[Kind, ...] = ("budget", "budget_day", "budget_month")
UNITS: dict[Kind, str] = {
    "itpm": "input tokens a minute",
    "otpm": "output tokens a minute",
    "qpm": "queries a minute",
    "qph": "queries an hour",
    "in_flight": "requests in flight",
    "budget": "in all",
    "budget_day": "a day",
    "budget_month": "a month",
}
RATES: tuple[Kind, ...] = ("itpm", "otpm", "qpm", "qph")
SLOTS_BEFORE = 60
ALL_OF_IT = 2**62
"""More than any limit."""
_SLOT_SECONDS: dict[Kind, int] = {"itpm": 1, "otpm": 1, "qpm": 1, "qph": 60}
DAY_SECONDS = 86_400


class Amounts(Struct, frozen=True, kw_only=True):
    """The amounts that one request adds to a window or, if negative, gives back. ``money`` is in micro-units."""

    input: int = 0
    output: int = 0
    queries: int = 0
    in_flight: int = 0
    money: int = 0

    def of(self, kind: Kind) -> int:
        if kind == "itpm":
            return self.input
        if kind == "otpm":
            return self.output
        if kind in ("qpm", "qph"):
            return self.queries
        return self.in_flight if kind == "in_flight" else self.money


UNBOUNDED = -1
"""The amount of a slice of what had no limit when it was lent."""


class Lent(Struct, array_like=True, frozen=True):
    """A slice of a window that is lent to a process until second ``until``: the ``amounts`` that it may charge without
    asking, and those that it has charged and not reported. ``number`` counts its rounds of lending."""

    number: int
    until: int
    amounts: Amounts


class WindowState(Struct, array_like=True):
    """All windows of one subject.

    ``slots[kind]`` maps slot numbers to amounts; ``money`` has the total and amounts by UTC period. ``lent`` are the
    slices of processes, which were asked at second ``recalled`` to give them back.
    """

    latest: int = 0
    slots: dict[str, dict[int, int]] = {}
    in_flight: int = 0
    money: int = 0
    day: tuple[int, int] = (0, 0)
    month: tuple[int, int] = (0, 0)
    lent: dict[str, Lent] = {}
    recalled: int = 0

    def copy(self) -> WindowState:
        return decode(encode(self))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WindowState)
encode = _encoder.encode
decode = _decoder.decode


def window_seconds(kind: Kind) -> int | None:
    """Return the length of the window of a rate; None for the other kinds."""
    return SLOTS_BEFORE * _SLOT_SECONDS[kind] if kind in RATES else None


def month_of(second: int) -> int:
    """Return the calendar month (UTC) of a second since the epoch, as months since January of year 0."""
    moment = datetime.datetime.fromtimestamp(second, datetime.UTC)
    return moment.year * 12 + moment.month - 1


def month_end(second: int) -> int:
    """Return the first second of the calendar month (UTC) after that of ``second``."""
    year, month = divmod(month_of(second) + 1, 12)
    return int(datetime.datetime(year, month + 1, 1, tzinfo=datetime.UTC).timestamp())


def charge(state: WindowState, at: int, amounts: Amounts) -> None:
    """Add ``amounts`` to the slots of second ``at``. A slot that has left its window is not changed."""
    state.latest = max(state.latest, at)
    for kind, seconds in _SLOT_SECONDS.items():
        value = amounts.of(kind)
        first = state.latest // seconds - SLOTS_BEFORE
        slots = state.slots.setdefault(kind, {})
        for slot in [s for s in slots if s < first]:
            del slots[slot]
        if value and at // seconds >= first:
            slots[at // seconds] = slots.get(at // seconds, 0) + value
            if not slots[at // seconds]:
                del slots[at // seconds]
    state.in_flight += amounts.in_flight
    state.money += amounts.money
    state.day = _in_period(state.day, at // DAY_SECONDS, amounts.money)
    state.month = _in_period(state.month, month_of(at), amounts.money)


def _in_period(have: tuple[int, int], period: int, money: int) -> tuple[int, int]:
    if period > have[0]:
        return (period, money)
    return (period, have[1] + money) if period == have[0] else have


def used(state: WindowState, kind: Kind, now: int) -> int:
    """Return the amount that counts against a limit of ``kind`` at second ``now``."""
    if kind == "in_flight":
        return state.in_flight
    if kind == "budget":
        return state.money
    if kind == "budget_day":
        return state.day[1] if state.day[0] == now // DAY_SECONDS else 0
    if kind == "budget_month":
        return state.month[1] if state.month[0] == month_of(now) else 0
    first = now // _SLOT_SECONDS[kind] - SLOTS_BEFORE
    return sum(amount for slot, amount in state.slots.get(kind, {}).items() if slot >= first)


def lent(state: WindowState, kind: Kind) -> int:
    """Return the amount that counts against a limit of ``kind`` because it is lent."""
    amounts = [one.amounts.of(kind) for one in state.lent.values()]
    return ALL_OF_IT if UNBOUNDED in amounts else sum(amounts)


def free_at(state: WindowState, kind: Kind, now: int, *, allowed: int, wanted: int) -> int | None:
    """Return the second at which ``wanted`` fits under ``allowed`` if nothing else is admitted or credited, or None.

    For requests in flight, whose end is not known, the advice is one second.
    """
    if wanted > allowed:
        return None
    if kind == "in_flight":
        return now + 1
    if kind == "budget":
        return None
    if kind == "budget_day":
        return (now // DAY_SECONDS + 1) * DAY_SECONDS
    if kind == "budget_month":
        return month_end(now)
    seconds = _SLOT_SECONDS[kind]
    excess = used(state, kind, now) + wanted - allowed
    if excess <= 0:
        return now
    first = now // seconds - SLOTS_BEFORE
    for slot, amount in sorted(state.slots.get(kind, {}).items()):
        if slot >= first:
            excess -= amount
            if excess <= 0:
                return (slot + SLOTS_BEFORE + 1) * seconds
    return None
