"""Slices of limits: what this process may charge to windows without asking the store, and what it has charged of it.

See docs/decisions/0020-slices-of-limits-are-lent-to-processes.md. Nothing here knows the store: ``lending`` lends,
collects and gives back, ``Ledger`` draws.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from msgspec import Struct

from ..accounts import windows
from ..accounts.authorization import ANONYMOUS
from ..accounts.limits import SHADOW, Limit, LimitStatus, Subject, standing, subjects_of
from ..accounts.windows import UNBOUNDED, Amounts, WindowState
from .asked import Asked, limited, wanted_of

FIELDS = ("input", "output", "queries", "in_flight", "money")
"""The fields of ``Amounts``, in the order of lists of amounts."""
_IN_FLIGHT = FIELDS.index("in_flight")
WANTED_PER_SECOND = 16
"""Requests of the same key, endpoint and end user in a second, from which on slices pay."""
IDLE_SECONDS = 2.0
"""A slice goes back when nothing has been drawn from it for so long."""
HOLD_OFF_SECONDS = 3
"""So long after a recall nothing of a window is lent."""
MAX_PROFILES = 256

Charges: TypeAlias = dict[int, list[int]]
"""Amounts by the second of the admission that they are charged to."""
Key: TypeAlias = tuple[str, str, str, str]


def used_of(charges: Charges | None, field: int) -> int:
    """Return how much of a slice ``charges`` use up.

    What was reported before is credited to its second, which may have left the window by the time of the next charge:
    such a credit is lent again by the store alone. Requests in flight count now, whenever they began.
    """
    if not charges:
        return 0
    if field == _IN_FLIGHT:
        return sum(values[field] for values in charges.values())
    return sum(max(0, values[field]) for values in charges.values())


def _add(charges: Charges, at: int, amounts: Amounts, sign: int = 1) -> None:
    values = charges.setdefault(at, [0] * len(FIELDS))
    for i, name in enumerate(FIELDS):
        values[i] += sign * getattr(amounts, name)


class Slice:
    """The slice of one window, of the window's ``epoch``.

    ``ceiling`` is how much ``frozen`` and ``pending`` together may use: charges that are being reported, and those
    since. ``keep`` of it stays lent whatever the report's outcome, ``target`` is asked for. ``busy`` transactions will
    charge or credit it. If it ``is_closing`` nothing is drawn from it and nothing credited, and if it ``leaves`` no
    charge can come any more. ``state`` is the window as far as this process knows it, for what is left.
    """

    def __init__(self, subject: Subject, epoch: int) -> None:
        self.subject, self.epoch = subject, epoch
        self.number = 0
        self.granted_at = 0
        self.ceiling = [0] * len(FIELDS)
        self.keep = [0] * len(FIELDS)
        self.target = [0] * len(FIELDS)
        self.demand = [0] * len(FIELDS)
        self.largest = [0] * len(FIELDS)
        self.pending: Charges = {}
        self.frozen: Charges | None = None
        self.busy = 0
        self.is_closing = self.leaves = self.is_void = False
        self.state = WindowState()

    def used(self, field: int) -> int:
        return used_of(self.frozen, field) + used_of(self.pending, field)

    def has_room(self, wanted: Sequence[int]) -> bool:
        for i, want in enumerate(wanted):
            if want > 0 and self.ceiling[i] != UNBOUNDED and self.used(i) + want > self.ceiling[i]:
                return False
        return True

    def charge(self, at: int, amounts: Amounts, sign: int = 1) -> None:
        _add(self.pending, at, amounts, sign)
        signed = amounts if sign > 0 else Amounts(**{name: -getattr(amounts, name) for name in FIELDS})
        windows.charge(self.state, at, signed)

    def ask_for(self, wanted: Sequence[int]) -> None:
        for i, want in enumerate(wanted):
            self.demand[i] += want
            self.largest[i] = max(self.largest[i], want)

    def freeze(self) -> None:
        """Begin a report, unless the outcome of the last one is not known."""
        if self.frozen is not None:
            return
        self.frozen, self.pending = self.pending, {}
        self.leaves = self.is_closing and not self.busy
        for i, ceiling in enumerate(self.ceiling):
            self.target[i] = 0 if self.is_closing else 2 * (self.demand[i] + self.largest[i])
            if ceiling == UNBOUNDED:
                self.keep[i] = UNBOUNDED
                continue
            used = used_of(self.frozen, i)
            self.keep[i] = min(ceiling - used, self.target[i])
            self.ceiling[i] = used + self.keep[i]
        self.demand = [value // 2 for value in self.demand]

    def renew(self, number: int, amounts: Sequence[int], state: WindowState, now: int) -> None:
        """End a report that the store has; ``amounts`` are lent from second ``now`` on."""
        self.number, self.ceiling, self.frozen = number, list(amounts), None
        self.granted_at = max(self.granted_at, now)
        self.state = state
        for at, values in self.pending.items():
            windows.charge(state, at, Amounts(**dict(zip(FIELDS, values, strict=True))))


class Drawn(Struct, kw_only=True):
    """The amounts that a request has drawn from slices, and its row as it was written."""

    slices: tuple[Slice, ...]
    row: dict[str, object]
    wanted: Amounts
    charged_at: int
    fence: Fence
    limits: tuple[LimitStatus, ...] = ()


class Fence(Struct, frozen=True, kw_only=True):
    """The part of the store that must not have changed: the limits that apply, and the windows with their epochs.

    ``named`` and ``subjects`` are where they are looked for, ``limits`` and ``windows`` what was found there.
    """

    named: frozenset[Subject]
    subjects: frozenset[Subject]
    limits: frozenset[tuple[str, str, str, int]]
    windows: frozenset[tuple[str, str, int]]


def joined(fences: Iterable[Fence]) -> Fence:
    """Return a fence that holds if all of ``fences`` do."""
    each = list({id(fence): fence for fence in fences}.values())
    if len(each) == 1:
        return each[0]
    return Fence(
        named=frozenset().union(*(fence.named for fence in each)),
        subjects=frozenset().union(*(fence.subjects for fence in each)),
        limits=frozenset().union(*(fence.limits for fence in each)),
        windows=frozenset().union(*(fence.windows for fence in each)),
    )


class Profile:
    """A kind of requests, which count in the same windows; ``fence`` is None until they may draw from slices."""

    def __init__(self, asked: Asked, used_at: float) -> None:
        self.named = limited(asked.reservation)
        self.subjects = subjects_of(asked.row)  # type: ignore[arg-type]
        self.used_at = used_at
        self.fence: Fence | None = None
        self.slices: tuple[Slice, ...] = ()
        self.paired: list[tuple[Limit, Slice]] = []
        self.demand = [0] * len(FIELDS)
        self.largest = [0] * len(FIELDS)

    def ask_for(self, wanted: Sequence[int], now: float) -> None:
        self.used_at = now
        for i, want in enumerate(wanted):
            self.demand[i] += want
            self.largest[i] = max(self.largest[i], want)
        for one in self.slices:
            one.ask_for(wanted)


def key_of(asked: Asked) -> Key | None:
    """Return whose slices a request may draw from: none if it takes from a reserve, or counts nowhere."""
    reservation = asked.reservation
    if reservation.bucket is not None or reservation.mode == SHADOW:
        return None
    return (reservation.endpoint, reservation.key_id, reservation.tenant, reservation.limited_user)


class Slices:
    """The slices of this process. Thread-safe; ``lending.Lender`` changes what is lent."""

    def __init__(self, *, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.lock = threading.Lock()
        self.is_lending = False
        """Whether there is somebody who lends: without, nothing is asked for."""
        self.wanted = threading.Event()
        """It is set when the lender should not wait."""
        self.profiles: dict[Key, Profile] = {}
        self.slices: dict[Subject, Slice] = {}
        self.doubted: dict[Subject, int] = {}
        """Windows, with their epochs, of which it is not known whether they have what was charged."""
        self._held_off: dict[Subject, float] = {}
        self._counts: dict[Key, int] = {}
        self._counted_since = monotonic()

    def note(self, asked: Asked) -> None:
        """Count a request that was admitted without a slice, so that its like may get some."""
        key = key_of(asked)
        if not self.is_lending or key is None:
            return
        now, wanted = self._monotonic(), _amounts(wanted_of(asked))
        with self.lock:
            if (profile := self.profiles.get(key)) is not None:
                profile.ask_for(wanted, now)
                return
            if now - self._counted_since >= 1.0:
                self._counts, self._counted_since = {}, now
            self._counts[key] = self._counts.get(key, 0) + 1
            if self._counts[key] < WANTED_PER_SECOND or len(self.profiles) >= MAX_PROFILES:
                return
            profile = Profile(asked, now)
            if any(self._held_off.get(subject, now) > now for subject in profile.subjects):
                return
            profile.ask_for(wanted, now)
            profile.demand = [2 * WANTED_PER_SECOND * value for value in wanted]
            self.profiles[key] = profile
            self.wanted.set()

    def draw(self, asked: Asked, now: int) -> Drawn | None:
        """Charge a request to slices, if all that it counts in have room; the row is not in the store yet.

        ``admitted``, ``undo`` or ``doubt`` must follow. No charge is earlier than the loan that it uses.
        """
        key = key_of(asked)
        if not self.is_lending or key is None:
            return None
        with self.lock:
            profile = self.profiles.get(key)
            if profile is None or profile.fence is None or not all(map(_is_usable, profile.slices)):
                return None
            amounts = wanted_of(asked)
            wanted = _amounts(amounts)
            if not all(one.has_room(wanted) for one in profile.slices):
                self.wanted.set()
                return None
            profile.ask_for(wanted, self._monotonic())
            at = max([now, *(one.granted_at for one in profile.slices)])
            for one in profile.slices:
                one.charge(at, amounts)
                one.busy += 1
            row = asked.row | {"charged_at": at, "bucket_milli": 0}
            drawn = Drawn(slices=profile.slices, row=row, wanted=amounts, charged_at=at, fence=profile.fence)
            found = [(limit, one.state) for limit, one in profile.paired]
            drawn.limits = standing(found, at, is_shared=is_shared(asked.reservation.key_id))
            return drawn

    def admitted(self, drawn: Drawn) -> None:
        """Note that the row of ``drawn`` is in the store."""
        with self.lock:
            for one in drawn.slices:
                one.busy -= 1

    def undo(self, drawn: Drawn, key: Key | None) -> None:
        """Take back the charge of a request whose row is not in the store, because its fence did not hold."""
        with self.lock:
            for one in drawn.slices:
                one.busy -= 1
                one.charge(drawn.charged_at, drawn.wanted, -1)
            if key is not None and (profile := self.profiles.get(key)) is not None:
                profile.fence = None
            self.wanted.set()

    def doubt(self, drawn: Drawn) -> None:
        """End a transaction whose outcome is not known: the windows are built again from the rows."""
        with self.lock:
            for one in drawn.slices:
                one.busy -= 1
                self.doubted[one.subject] = one.epoch
                one.is_closing = True
            self.wanted.set()

    def begin_settling(self, drawn: Drawn) -> bool:
        """Return whether the credit of a settlement can go to the slices; ``credit`` or ``doubt`` must follow."""
        with self.lock:
            if not all(map(_is_usable, drawn.slices)):
                return False
            for one in drawn.slices:
                one.busy += 1
            return True

    def credit(self, drawn: Drawn, change: Amounts) -> None:
        """Charge the ``change`` of a row that was settled to the second of its admission."""
        with self.lock:
            for one in drawn.slices:
                one.busy -= 1
                one.charge(drawn.charged_at, change)

    def close(self) -> None:
        """Ask for nothing more, and give back everything in the next round."""
        with self.lock:
            self.is_lending = False
            self.profiles.clear()

    # the lender's

    def begin_round(self) -> tuple[list[Profile], dict[Subject, Slice]]:
        """Freeze what was charged, and return who wants slices, and all that there are."""
        now = self._monotonic()
        with self.lock:
            self.wanted.clear()
            self._held_off = {subject: until for subject, until in self._held_off.items() if until > now}
            idle = [key for key, profile in self.profiles.items() if now - profile.used_at > IDLE_SECONDS]
            for key in idle:
                del self.profiles[key]
            for profile in self.profiles.values():
                profile.demand = [value // 2 for value in profile.demand]
            wanted = {subject for profile in self.profiles.values() for subject in profile.subjects}
            for one in self.slices.values():
                one.is_closing = one.is_closing or one.subject not in wanted
                one.freeze()
            return list(self.profiles.values()), dict(self.slices)

    def drop(self, subject: Subject) -> None:
        """Forget a slice; the caller holds the lock."""
        if (one := self.slices.pop(subject, None)) is not None:
            one.is_void = True

    def hold_off(self, subjects: Iterable[Subject], seconds: float) -> None:
        """Let nobody ask for slices of ``subjects`` for a while, and close those; the caller holds the lock."""
        until, named = self._monotonic() + seconds, set(subjects)
        for subject in named:
            self._held_off[subject] = until
            if (one := self.slices.get(subject)) is not None:
                one.is_closing = True
        for key in [key for key, profile in self.profiles.items() if named & set(profile.subjects)]:
            del self.profiles[key]


def is_shared(key_id: str) -> bool:
    """Return whether the caller with this key shares its endpoints with others."""
    return key_id != ANONYMOUS.key_id


def _is_usable(one: Slice) -> bool:
    return not one.is_closing and not one.is_void


def _amounts(amounts: Amounts) -> list[int]:
    return [getattr(amounts, name) for name in FIELDS]
