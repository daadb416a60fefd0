"""Lending: the transactions in which this process reports what it has charged to slices, and gets or returns some.

A window's slices are part of its state. All that is charged is either in the window or covered by what is lent, so
that the limit holds whoever charges what. A slice that is not renewed in time ends: the window is then built again from
the rows, which the process that held it can no longer add to (``fenced``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import sqlalchemy as sa
from msgspec import Struct

from ..accounts import windows
from ..accounts.limits import Limit, Subject, in_force
from ..accounts.monotonic_clock import MonotonicClock
from ..accounts.windows import UNBOUNDED, Amounts, Kind, Lent, WindowState
from ..store.statements import FOR_UPDATE, PAIRS, fetch, parameter, pipelined
from ..store.store import Store
from ..store.tables import windows as window_table
from .admission import build, has_ended, move_up_all
from .settlement import LEDGER_FIRST, save_windows
from .slices import FIELDS, HOLD_OFF_SECONDS, Fence, Profile, Slice, Slices

LEND_SECONDS = 0.25
"""How often what was charged is reported, and recalls are heard."""
LEASE_SECONDS = 30
"""How long after its last report a process's slices are void."""
REFUSED_SECONDS = 1.0
"""So long nothing is asked for of a window that had too little left to lend."""
TIMEOUT_SECONDS = 2.0
_FIELD_OF: dict[Kind, int] = {
    "itpm": 0,
    "otpm": 1,
    "qpm": 2,
    "qph": 2,
    "in_flight": 3,
    "budget": 4,
    "budget_day": 4,
    "budget_month": 4,
}
_LIMITS = f"SELECT scope, subject, kind, value, soft FROM limits WHERE (scope, subject) IN {PAIRS['postgresql']}"
_WINDOWS = (
    f"SELECT scope, subject, state, epoch FROM windows WHERE (scope, subject) IN {PAIRS['postgresql']} "
    f"ORDER BY scope, subject {FOR_UPDATE['postgresql']}"
)

LimitRow: TypeAlias = tuple[str, str, Kind, int, bool]


class Outcome(Struct, kw_only=True):
    """The outcome of a round for a window's slice. ``amounts`` are lent from now on, None if nothing is.

    ``is_doubted``: the window has to be built from the rows. ``closes``: it has to be given back. ``waits``: nothing
    was done.
    """

    epoch: int
    state: WindowState
    number: int = 0
    amounts: list[int] | None = None
    is_doubted: bool = False
    closes: bool = False
    waits: bool = False
    is_saved: bool = True


class Round(Struct, kw_only=True):
    """The outcome of each window that there is, the limits of each, and the limits as they are set."""

    now: int
    outcomes: dict[Subject, Outcome]
    set_limits: dict[Subject, list[LimitRow]]


class Lender:
    """The borrower's side of lending, for one process; ``holder`` returns its name."""

    def __init__(self, store: Store, slices: Slices, clock: MonotonicClock, holder: Callable[[], str]) -> None:
        self._store, self._slices, self._clock, self._holder = store, slices, clock, holder
        self._running = threading.Lock()

    def round(self) -> bool:
        """Report, return and ask for slices; return whether there are any, or somebody waits for some.

        Raises ``Unavailable``. Two rounds at once are one.
        """
        if not self._running.acquire(blocking=False):
            return True
        try:
            return self._round()
        finally:
            self._running.release()

    def _round(self) -> bool:
        profiles, held = self._slices.begin_round()
        for subject in self._rebuild():
            held.pop(subject, None)
        if not profiles and not held:
            return False
        work = partial(lend, holder=self._holder(), profiles=profiles, held=held, clock=self._clock)
        found = self._store.write(work, timeout=TIMEOUT_SECONDS)
        with self._slices.lock:
            for subject in {*held, *found.outcomes}:
                self._apply(subject, found)
            for profile in profiles:
                _open(profile, found, self._slices.slices)
            return bool(self._slices.slices or self._slices.profiles)

    def _rebuild(self) -> list[Subject]:
        """Build the windows that are doubted, and return them: their slices are void."""
        with self._slices.lock:
            doubted = dict(self._slices.doubted)
        if not doubted:
            return []
        self._store.write(partial(rebuild, store=self._store, epochs=doubted, now=int(self._clock.now())))
        with self._slices.lock:
            for subject in doubted:
                del self._slices.doubted[subject]
                self._slices.drop(subject)
        return list(doubted)

    def _apply(self, subject: Subject, found: Round) -> None:
        outcome, mine = found.outcomes.get(subject), self._slices.slices.get(subject)
        if outcome is None or (mine is not None and mine.epoch != outcome.epoch):  # it was removed, or built again
            self._slices.drop(subject)
            mine = None
        if outcome is None or outcome.waits:
            if outcome is not None and outcome.closes:
                self._slices.hold_off([subject], HOLD_OFF_SECONDS)
            return
        if outcome.is_doubted:
            self._slices.doubted[subject] = outcome.epoch
            self._slices.hold_off([subject], REFUSED_SECONDS)
            self._slices.wanted.set()
        elif outcome.amounts is None:
            self._slices.drop(subject)
        else:
            if mine is None:
                mine = self._slices.slices[subject] = Slice(subject, outcome.epoch)
            mine.renew(outcome.number, outcome.amounts, outcome.state, found.now)
        if outcome.closes:
            if mine is not None:  # somebody may wait for it
                self._slices.wanted.set()
            self._slices.hold_off([subject], HOLD_OFF_SECONDS if mine is not None else REFUSED_SECONDS)


def _open(profile: Profile, found: Round, held: Mapping[Subject, Slice]) -> None:
    """Let requests of ``profile`` draw if all windows in which they count have been lent; the caller holds the lock."""
    profile.fence = None
    force = _in_force(profile, found.set_limits)
    by_scope = dict(profile.subjects)
    existing = [subject for subject in profile.subjects if subject in found.outcomes]
    slices = [held[subject] for subject in existing if subject in held and not held[subject].is_closing]
    if len(slices) < len(existing) or any((limit.scope, by_scope[limit.scope]) not in existing for limit in force):
        return
    profile.slices = tuple(slices)
    profile.paired = [(limit, held[limit.scope, by_scope[limit.scope]]) for limit in force]
    profile.fence = Fence(
        named=frozenset(profile.named),
        subjects=frozenset(profile.subjects),
        limits=frozenset(row[:4] for pair in profile.named for row in found.set_limits.get(pair, ())),
        windows=frozenset((*one.subject, one.epoch) for one in slices),
    )


def _in_force(profile: Profile, set_limits: Mapping[Subject, list[LimitRow]]) -> list[Limit]:
    rows = [row for pair in profile.named for row in set_limits.get(pair, ())]
    return in_force(Limit.of_row(*row) for row in rows)  # type: ignore[arg-type]


def rebuild(connection: sa.Connection, *, store: Store, epochs: Mapping[Subject, int], now: int) -> None:
    """Build windows from the rows, if they still are those of these ``epochs``."""
    store.lock_ledger(connection)
    for (scope, subject), epoch in sorted(epochs.items()):
        this = sa.and_(window_table.c.scope == scope, window_table.c.subject == subject)
        if connection.execute(sa.select(window_table.c.epoch).where(this)).scalar_one_or_none() == epoch:
            build(connection, store, (scope, subject), now)


def lend(
    connection: sa.Connection,
    *,
    holder: str,
    profiles: Sequence[Profile],
    held: Mapping[Subject, Slice],
    clock: MonotonicClock,
) -> Round:
    """Charge what ``held`` slices report, and lend for ``profiles``, in two round trips of which the second commits.

    A report that the store has already, whose answer was lost, is recognised by its number.
    """
    named = sorted({pair for profile in profiles for pair in profile.named})
    wanted = {subject for profile in profiles for subject in profile.subjects}
    limit_rows, window_rows = fetch(
        connection,
        *LEDGER_FIRST["postgresql"],
        (_LIMITS, (parameter(named),)),
        (_WINDOWS, (parameter(sorted(wanted | held.keys())),)),
    )[-2:]
    set_limits: dict[Subject, list[LimitRow]] = {}
    for scope, subject, *rest in limit_rows:
        set_limits.setdefault((scope, subject), []).append((scope, subject, *rest))
    states = {(scope, subject): windows.decode(state) for scope, subject, state, _ in window_rows}
    ahead = move_up_all(clock, states)
    now = int(clock.now())
    limits_of = _by_window(profiles, set_limits)
    outcomes = {}
    for scope, subject, _, epoch in window_rows:
        window = (scope, subject)
        mine = held.get(window)
        if window in ahead:
            outcomes[window] = Outcome(epoch=epoch, state=states[window], closes=True, waits=True, is_saved=False)
        else:
            asking = [profile for profile in profiles if window in profile.subjects]
            outcomes[window] = _lend_one(states[window], epoch, mine, holder, limits_of.get(window, []), asking, now)
    with pipelined(connection, commit=True):
        save_windows(connection, {window: one.state for window, one in outcomes.items() if one.is_saved})
    return Round(now=now, outcomes=outcomes, set_limits=set_limits)


def _by_window(profiles: Sequence[Profile], set_limits: Mapping[Subject, list[LimitRow]]) -> dict[Subject, list[Limit]]:
    found: dict[Subject, list[Limit]] = {}
    for profile in profiles:
        by_scope = dict(profile.subjects)
        for limit in _in_force(profile, set_limits):
            limits = found.setdefault((limit.scope, by_scope[limit.scope]), [])
            if limit not in limits:
                limits.append(limit)
    return found


def _lend_one(
    state: WindowState,
    epoch: int,
    mine: Slice | None,
    holder: str,
    limits: Sequence[Limit],
    asking: Sequence[Profile],
    now: int,
) -> Outcome:
    entry = state.lent.get(holder)
    others = {name: lent for name, lent in state.lent.items() if name != holder}
    if mine is not None and mine.epoch != epoch:
        mine = None
    if has_ended(WindowState(lent=others), now):
        return Outcome(epoch=epoch, state=state, is_doubted=True, is_saved=False)
    if mine is not None:
        if entry is not None and entry.number == mine.number + 1:  # the answer was lost
            amounts = [getattr(entry.amounts, name) for name in FIELDS]
            return Outcome(epoch=epoch, state=state, number=entry.number, amounts=amounts, is_saved=False)
        if entry is None or entry.number != mine.number:  # the database is not the one that lent it
            return Outcome(epoch=epoch, state=state, is_doubted=True, is_saved=False)
        for at, values in sorted((mine.frozen or {}).items()):
            windows.charge(state, at, Amounts(**dict(zip(FIELDS, values, strict=True))))
        if mine.leaves:
            del state.lent[holder]
            return Outcome(epoch=epoch, state=state)
    number = (0 if entry is None else entry.number) + 1
    is_recalled = now - state.recalled < HOLD_OFF_SECONDS
    keep = [0] * len(FIELDS) if mine is None else mine.keep
    lent = None if is_recalled or not asking else _amounts(state, keep, mine, others, limits, asking, now)
    if lent is None and mine is None:
        if entry is not None:
            del state.lent[holder]
        return Outcome(epoch=epoch, state=state, closes=True, is_saved=entry is not None)
    state.latest = max(state.latest, now)
    amounts = keep if lent is None else lent
    state.lent[holder] = Lent(
        number=number, until=now + LEASE_SECONDS, amounts=Amounts(**dict(zip(FIELDS, amounts, strict=True)))
    )
    return Outcome(epoch=epoch, state=state, number=number, amounts=amounts, closes=lent is None and bool(asking))


def _amounts(
    state: WindowState,
    keep: Sequence[int],
    mine: Slice | None,
    others: Mapping[str, Lent],
    limits: Sequence[Limit],
    asking: Sequence[Profile],
    now: int,
) -> list[int] | None:
    """Return what is lent: as much as is asked for, but no more than a quarter of what is left beyond what is kept.

    None if that is not enough for one request: near a limit nothing is lent, and each request is checked in the store.
    So are all requests that a soft limit counts, because each that goes beyond it says so.
    """
    if any(limit.soft for limit in limits):
        return None
    found = []
    for i, name in enumerate(FIELDS):
        bounds = [limit for limit in limits if _FIELD_OF[limit.kind] == i]
        if not bounds:
            found.append(UNBOUNDED)
            continue
        if keep[i] == UNBOUNDED:  # the limit is new: what was charged without it is reported first
            return None
        taken = [getattr(lent.amounts, name) for lent in others.values()]
        if UNBOUNDED in taken:
            return None
        room = min(limit.value - windows.used(state, limit.kind, now) for limit in bounds) - sum(taken)
        largest = max(profile.largest[i] for profile in asking)
        target = (
            2 * sum(profile.demand[i] + profile.largest[i] for profile in asking) if mine is None else mine.target[i]
        )
        amount = keep[i] + max(0, min(target - keep[i], (room - keep[i]) // 4))
        if amount < largest:
            return None
        found.append(amount)
    return found
