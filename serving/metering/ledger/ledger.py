"""The ledger: one row per request, reserved at admission and settled at the end. See docs/metering.md."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy.exc import IntegrityError

from ...interface.errors import AlreadyExists, InvalidField, RequestError, Unavailable
from ...system.journal import ENGINES
from ...system.progress import MAX_ID
from ..accounts.authorization import Caller
from ..accounts.limits import Subject
from ..accounts.money import FREE, Price, cost
from ..accounts.monotonic_clock import MonotonicClock, since_boot
from ..accounts.prices import Prices, price_names
from ..accounts.windows import Amounts
from ..proof import chain
from ..proof.answers import proof_of, request_key
from ..proof.keys import keys_of
from ..store.checks import reason
from ..store.group_commit import GroupCommit
from ..store.staleness import StalenessDetector
from ..store.store import Store
from ..store.tables import ledger
from . import admission, crash_recovery, engine_journals, fenced
from .admission import RECALL_SECONDS, Admitted, LentElsewhere, Reply, WindowMissing, WindowsAhead
from .asked import Asked
from .count_audit import CountAudit
from .lease import Began, Lease, Reservation
from .lease_owner import LeaseOwner
from .lending import LEND_SECONDS, Lender
from .limits_left import LimitLeft, limits_left
from .settlement import Settlement, settle_all, settle_in
from .slices import Drawn, Slices, key_of
from .store_clock import StoreClock
from .store_directory import open_directory

log = logging.getLogger(__name__)

ADMISSION_TIMEOUT = 2.0
SETTLE_TIMEOUT = 0.5
BREAKER_SECONDS = 1.0
"""A circuit breaker: so long after a failure of the store admissions are refused and settlements spooled unasked."""
ORPHAN_SECONDS = 30
"""How long a row may be open without a lease in its process; a later settlement replaces the one made then."""
PRUNE_SECONDS = 60
"""How long after one removal of old windows of end users upkeep waits with the next."""
MAX_TOKENS = 2**40
MAX_CHAIN_BATCHES = 50
"""At most so many batches of links a round of upkeep, which has other work too."""
LENT_ELSEWHERE_PAUSE = 0.05
"""Seconds until a request that waits for what is lent asks again."""
LENDER_PAUSE = 0.02
"""Seconds between two rounds of lending, however much is asked for."""
CHAIN_PAUSE = 0.02
"""Seconds between two batches, in which requests that wait for SQLite's lock get it."""


class Closed(Struct, frozen=True, kw_only=True):
    """A settlement on its way to the store, and what its request has drawn from slices."""

    settlement: Settlement
    drawn: Drawn | None = None


class LedgerStatus(Struct, frozen=True, kw_only=True):
    """The ledger as this process sees it.

    ``open_rows`` is the number in the store at the last round of upkeep, ``spooled`` the number of settlements waiting
    on this host. ``answers`` says whether the store answers.
    """

    open_rows: int
    spooled: int
    answers: bool


class NoRoom(Unavailable):
    """The disk has no room for the progress of requests; the store itself is well."""

    def __init__(self, error: OSError) -> None:
        told = f"no room to keep the progress of a request ({error.strerror or error})"
        super().__init__(told, retry_after=BREAKER_SECONDS)


class Ledger:
    """The ledger of a store, as one process uses it. Thread-safe.

    Create ``Ledger(store)`` and call ``start()`` in every worker process (after the fork), and ``close()`` at its end.
    ``state_dir`` must be on a local disk and the same for all workers: it holds the locks, progress files and spools of
    this host's processes, in one directory per store. ``clock`` gives seconds since the epoch, for timestamps of rows;
    ``monotonic`` measures all durations. ``on_outage`` is called each time the store stops answering. With
    ``max_clock_skew`` seconds, windows follow the store's own clock, and nothing is admitted while that of this host is
    further from it.
    """

    def __init__(
        self,
        store: Store,
        *,
        state_dir: str | Path,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = since_boot,
        max_clock_skew: float | None = None,
    ) -> None:
        self.store = store
        self.prices = Prices(store, clock=clock)
        self.state_dir = open_directory(store, Path(state_dir))
        self._clock, self.monotonic = clock, monotonic
        self._window_clock = MonotonicClock(clock, monotonic)
        self._store_clock = (
            None if max_clock_skew is None else StoreClock(store, max_clock_skew, wall=clock, monotonic=monotonic)
        )
        self._wrong_clock = ""
        self._follow_clock()
        self.audit = CountAudit(store, clock=clock, monotonic=monotonic)
        settled = self.audit.settled
        self._recovery = crash_recovery.Recovery(store, self.state_dir, monotonic=monotonic, settled=settled)
        self._orphans = StalenessDetector(ORPHAN_SECONDS, monotonic=monotonic)
        self._admissions: GroupCommit[Asked, Admitted] = GroupCommit(self._reserve_all)
        self._settlements: GroupCommit[Closed, bool] = GroupCommit(self._settle_all)
        self._slices = Slices(monotonic=monotonic)
        self._lender = Lender(store, self._slices, self._window_clock, self._holder)
        self._drawn: dict[str, Drawn] = {}
        """Draws from slices of the open leases, by their requests' ids."""
        self._lending: threading.Thread | None = None
        self._lock = threading.Lock()
        self._owner: LeaseOwner | None = None
        self._open: dict[str, Lease] = {}
        self._spool_is_full = False
        self._hashing: bytes | None = None
        self._unspooled: list[tuple[LeaseOwner, int | None, Settlement]] = []
        self.on_outage: Callable[[], object] = lambda: None
        self._away_since: float | None = None
        self._open_rows = 0
        self._pruned_at = monotonic()
        self._refusing_until = 0.0  # for admissions
        self._spooling_until = 0.0  # for settlements, so that a slow one stops no admissions
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._is_ending = False

    @property
    def journal_dir(self) -> Path:
        """The directory in which this host's engines keep their journals; their clients tell them."""
        return (self.state_dir / ENGINES).absolute()

    @property
    def store_id(self) -> str:
        """The id of the ledger's store, by which engines on other hosts know it."""
        return self.state_dir.name

    def now_ms(self) -> int:
        return int(self._clock() * 1000)

    def reserve(self, reservation: Reservation) -> Lease:
        """Admit a request and reserve the most that it may use.

        Raises ``LimitExceeded`` (which limit, how much is left, and when to retry), ``AlreadyExists`` for a request id
        in use, and ``Unavailable`` while the store does not answer: nothing is admitted that cannot be accounted for.
        """
        _check(reservation)
        self._check_open()
        owner = self._ensure_owner()
        started = self._clock()
        began = Began(wall_ms=int(started * 1000), monotonic=self.monotonic())
        try:
            names = price_names(
                reservation.entity, reservation.model, reservation.endpoint, background=reservation.background
            )
            price = self.prices.at(names, self._time_of_prices())
        except Unavailable as error:
            self._open_breaker(error)
            raise
        price = price if reservation.pays_tokens else FREE
        row = _row(reservation, owner.name, began.wall_ms, price)
        key = self._prove(reservation, row)
        try:
            slot = owner.progress.hold()
        except OSError as error:  # nothing has been admitted
            raise NoRoom(error) from error
        asked = Asked(reservation=reservation, row=row)
        try:
            admitted = self._reserve(asked)
        except BaseException as error:
            owner.progress.give_back(slot)
            if isinstance(error, RequestError | WindowsAhead) or not asked.is_sent:
                raise
            # the answer to the commit was lost, or a greenlet was killed: the row may exist
            self._undo(owner, reservation.request_id, str(row["nonce"]))
            if isinstance(error, Unavailable):
                self._open_breaker(error)
            raise
        if self._is_ending:  # since the reservation began
            self._settle_or_spool(owner, None, self._nothing_used(reservation.request_id, str(row["nonce"])))
            raise _ending()
        lease = Lease(
            self,
            owner,
            reservation,
            slot=slot,
            began=began,
            limits=admitted.limits,
            within_reserve=admitted.within_reserve,
            beyond=admitted.beyond,
            price=price,
            proof_key=key,
        )
        self._open[reservation.request_id] = lease
        if admitted.drawn is not None:
            self._drawn[reservation.request_id] = admitted.drawn
        return lease

    def _prove(self, reservation: Reservation, row: dict[str, object]) -> bytes | None:
        """Add to ``row`` what repeats and proves the answer, and return the key of its hashes. Raises
        ``Unavailable``."""
        if reservation.asked is None:
            return None
        if self._hashing is None:
            self._hashing = keys_of(self.store).hashing
        key = request_key(self._hashing, reservation.request_id)
        row["proof"] = msgspec.structs.asdict(proof_of(reservation.asked, key))
        return key

    def check(
        self,
        *,
        key_id: str,
        tenant: str,
        endpoint: str | None,
        entities: Iterable[str | tuple[str, ...]] | None,
        generates: bool,
    ) -> None:
        """Refuse, before a request is read, a request that ``reserve`` would refuse in any case.

        ``endpoint`` is None if it is not known yet. ``entities`` are those that may answer if their tokens are billed,
        each with the names that its price may be set by, else None. Raises ``LimitExceeded``, ``PermissionDenied``,
        ``Unavailable``.
        """
        self._check_open()
        now = self._time_of_prices()
        costs = [cost(self.prices.at(entity, now), prompt=1, cached=0, completion=0) for entity in entities or ()]
        minimum = Amounts(input=1, output=int(generates), queries=1, in_flight=1, money=min(costs, default=0))
        ask = partial(
            admission.check, key_id=key_id, tenant=tenant, endpoint=endpoint, minimum=minimum, clock=self._window_clock
        )
        try:
            self.store.read(ask, timeout=ADMISSION_TIMEOUT)
        except WindowsAhead:
            raise
        except Unavailable as error:
            self._open_breaker(error)
            raise

    def limits_left(self, caller: Caller, endpoints: Iterable[str], *, end_user: str = "") -> tuple[LimitLeft, ...]:
        """Return what is left of each limit that ``caller``'s requests to ``endpoints`` would count against, those for
        ``end_user`` if one is named."""
        names = tuple(endpoints)
        work = partial(limits_left, caller=caller, endpoints=names, clock=self._window_clock, end_user=end_user)
        while True:
            try:
                return self.store.read(work)
            except WindowMissing as missing:
                self.store.write(self._build(missing.subjects))

    def _check_open(self) -> None:
        """Raise ``Unavailable`` while nothing is admitted, whoever asks."""
        if self._is_ending:
            raise _ending()
        if time.monotonic() < self._refusing_until:
            raise Unavailable("the metering store does not answer", retry_after=BREAKER_SECONDS)
        if self._wrong_clock:
            raise Unavailable(self._wrong_clock, retry_after=admission.RETRY_SECONDS)

    def _follow_clock(self) -> None:
        """Follow the store's clock, and note whether this host's is wrong; log when that changes."""
        if self._store_clock is None:
            return
        reading = self._store_clock.read()
        self._window_clock.follow(reading.store, reading.at, self._store_clock.max_skew)
        if (
            not self.store.has_clock
        ):  # its time is that of this host's processes, which follow no wall clock once they run
            return
        was, self._wrong_clock = self._wrong_clock, self._store_clock.refusal(reading)
        if self._wrong_clock and not was:
            log.error("nothing is admitted: %s", self._wrong_clock)
        if was and not self._wrong_clock:
            log.warning("the clock of this host is right again")

    def _time_of_prices(self) -> float:
        """Return the time by which prices are in force: a wall clock that is set back takes none of them back."""
        return max(self._clock(), self._window_clock.now())

    def _open_breaker(self, error: Unavailable) -> None:
        self._refusing_until = self._spooling_until = time.monotonic() + BREAKER_SECONDS
        self._note(error)

    def _note(self, error: Unavailable | None) -> None:
        """Note that the store answers (None) or failed with ``error``. If it has just stopped answering, log why and
        call ``on_outage``."""
        was = self._away_since is not None
        if error is None:
            self._away_since = None
        elif not was:
            self._away_since = time.monotonic()
        if error is not None and not was:
            log.warning(
                "the metering store does not answer (%s); settlements wait in the spool",
                reason(error.__cause__ or error),
            )
            self.on_outage()
        if was and error is None:
            log.warning("the metering store answers again")

    @property
    def away_seconds(self) -> float:
        """The time for which the store has not answered, 0.0 if it does."""
        since = self._away_since
        return 0.0 if since is None else time.monotonic() - since

    def status(self) -> LedgerStatus:
        """Return the ledger's status without querying the store."""
        waiting = sum(_lines(path) for path in self.state_dir.glob("owners/*/spool-*.jsonl"))
        answers = self._away_since is None
        return LedgerStatus(open_rows=self._open_rows, spooled=waiting + len(self._unspooled), answers=answers)

    def _reserve(self, asked: Asked) -> Admitted:
        until = time.monotonic() + RECALL_SECONDS
        while True:
            try:
                return self._admissions(self._lane(asked.reservation.tenant), asked)
            except LentElsewhere as lent:
                if self._is_ending or time.monotonic() > until:
                    raise lent.refusal from None
                self._slices.wanted.set()  # some of it may be lent to this process
                time.sleep(LENT_ELSEWHERE_PAUSE)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for others of their tenant to be admitted."""
        return self._admissions.waiting

    def _lane(self, tenant: str) -> str:
        """Return whose requests share transactions: a tenant's, which a slow one of another tenant does not hold up.

        SQLite runs one transaction at a time, so that all of them do.
        """
        return "" if self.store.takes_turns else tenant

    def _reserve_all(self, asked: Sequence[Asked]) -> list[Reply]:
        """Admit a group of reservations, and return for each what became of it. Raises ``Unavailable``."""
        self._check_open()  # it may have waited for a group that failed
        for one in asked:
            one.is_sent = True
        now = int(self._window_clock.now())
        drawn = [self._slices.draw(one, now) for one in asked]
        if not any(drawn):
            return self._reserve_in_store(asked)
        replies: list[Reply | None] = [None] * len(asked)
        if self._insert(asked, drawn):
            for i, drew in enumerate(drawn):
                if drew is not None:
                    replies[i] = Admitted(limits=drew.limits, within_reserve=True, drawn=drew)
        rest = [i for i, reply in enumerate(replies) if reply is None]
        for i, reply in zip(rest, self._reserve_in_store([asked[i] for i in rest]) if rest else (), strict=True):
            replies[i] = reply
        return [reply for reply in replies if reply is not None]

    def _insert(self, asked: Sequence[Asked], drawn: Sequence[Drawn | None]) -> bool:
        """Write the rows of what was drawn; return False if all of it is to be admitted in the store.

        If the outcome is not known, the windows are built from the rows, and those that are there are recognised.
        """
        drew = [one for one in drawn if one is not None]
        try:
            written = self.store.write(partial(fenced.insert, drawn=drew), timeout=ADMISSION_TIMEOUT)
        except BaseException as error:
            for one in drew:
                self._slices.doubt(one)
            if isinstance(error, Unavailable) or not isinstance(error, Exception):
                raise
            return False
        for ask, charged in zip(asked, drawn, strict=True):
            if charged is not None and written:
                self._slices.admitted(charged)
            elif charged is not None:
                self._slices.undo(charged, key_of(ask))
        return written

    def _reserve_in_store(self, asked: Sequence[Asked]) -> list[Reply]:
        """Check and charge the windows themselves. Raises ``Unavailable``."""
        attempts = 0

        def work(connection: sa.Connection) -> list[Reply]:
            nonlocal attempts
            attempts += 1
            return admission.reserve_all(connection, asked, self.store, clock=self._window_clock)

        try:
            replies = self.store.write(work, timeout=ADMISSION_TIMEOUT)
            if attempts > 1:
                replies = [self._unless_committed(*pair) for pair in zip(asked, replies, strict=True)]
        except Unavailable:
            raise
        except Exception as error:  # of one of them: its id is in use, or the answer to a commit was lost, or a defect
            if len(asked) > 1:
                return [self._reserve_one(one) for one in asked]
            if not isinstance(error, IntegrityError):
                raise
            return [self._committed_before(asked[0].reservation, str(asked[0].row["nonce"]))]
        missing = [i for i, reply in enumerate(replies) if isinstance(reply, WindowMissing)]
        if missing:
            subjects = sorted({one for i in missing for one in replies[i].subjects})  # type: ignore[union-attr]
            self.store.write(self._build(tuple(subjects)), timeout=ADMISSION_TIMEOUT)
            for i, reply in zip(missing, self._reserve_in_store([asked[i] for i in missing]), strict=True):
                replies[i] = reply
        for one, reply in zip(asked, replies, strict=True):
            if isinstance(reply, Admitted):
                self._slices.note(one)
        return replies

    def _build(self, subjects: tuple[Subject, ...]) -> Callable[[sa.Connection], None]:
        now = int(self._window_clock.now())
        return partial(admission.open_windows, store=self.store, subjects=subjects, now=now)

    def _reserve_one(self, asked: Asked) -> Reply:
        try:
            return self._reserve_in_store([asked])[0]
        except Unavailable:
            raise
        except Exception as error:
            return error

    def _unless_committed(self, asked: Asked, reply: Reply) -> Reply:
        """Return ``reply``, or, if it refuses what an attempt whose answer was lost has admitted, that admission."""
        if not isinstance(reply, RequestError | LentElsewhere):
            return reply
        try:
            return self._committed_before(asked.reservation, str(asked.row["nonce"]))
        except AlreadyExists:
            return reply

    def _undo(self, owner: LeaseOwner, request_id: str, nonce: str) -> None:
        """Close the row of a failed admission with nothing used, in case it was committed."""
        self._spool(owner, None, self._nothing_used(request_id, nonce))

    def _nothing_used(self, request_id: str, nonce: str) -> Settlement:
        return Settlement(
            request_id=request_id,
            nonce=nonce,
            prompt=0,
            cached=0,
            completion=0,
            finish_reason="error",
            status="error",
            ended_ms=self.now_ms(),
        )

    def _committed_before(self, reservation: Reservation, nonce: str) -> Admitted:
        """Return the result of a commit whose answer was lost. Raises ``AlreadyExists`` if the nonce is not ours."""
        query = sa.select(ledger.c.nonce, ledger.c.bucket_milli).where(ledger.c.request_id == reservation.request_id)
        found = self.store.read(lambda connection: connection.execute(query).one_or_none(), timeout=ADMISSION_TIMEOUT)
        if found is None or found.nonce != nonce:
            raise AlreadyExists("a request of this id is in the ledger already")
        return Admitted(limits=(), within_reserve=reservation.bucket is None or found.bucket_milli > 0)

    def close_lease(self, lease: Lease, owner: LeaseOwner, slot: int, settlement: Settlement) -> None:
        """Settle in the store, else in the spool, else (if the disk is full) keep it in memory for ``maintain``."""
        try:
            self._settle_or_spool(owner, slot, settlement, lease.reservation.tenant)
        finally:  # until then an end of the process leaves its counts to recovery
            self._open.pop(lease.request_id, None)

    def drop_lease(self, lease: Lease, owner: LeaseOwner, slot: int) -> None:
        """Forget a lease whose settlement was not left to the ledger (``Lease.hold``)."""
        self._open.pop(lease.request_id, None)
        self._drawn.pop(lease.request_id, None)
        self.audit.settled(lease.request_id)
        owner.progress.give_back(slot)

    def _holder(self) -> str:
        return self._ensure_owner().name

    @property
    def owner(self) -> str:
        """The name of this process among the owners of leases (``tables.owners``)."""
        return self._ensure_owner().name

    def _settle_or_spool(self, owner: LeaseOwner, slot: int | None, settlement: Settlement, tenant: str = "") -> None:
        stored = False
        try:
            stored = self.settled_in_store(settlement, tenant)
        finally:  # even if a greenlet is killed inside the transaction
            if not stored:
                self._spool(owner, slot, settlement)
        if stored and slot is not None:
            owner.progress.give_back(slot)

    def _settle_kept(self, owner: LeaseOwner, slot: int | None, settlement: Settlement, *, ask: bool) -> bool:
        """Settle what could not be spooled, alone: upkeep may have a thread of its own, and groups are for requests.

        Return whether the store answers; without ``ask`` only the spool is tried.
        """
        stored = False
        if ask:
            try:
                self._settle(settlement, timeout=SETTLE_TIMEOUT)
            except Exception as error:
                ask = not isinstance(error, Unavailable)
            else:
                stored = True
        if not stored:
            self._spool(owner, slot, settlement)
        elif slot is not None:
            owner.progress.give_back(slot)
        return ask

    def settled_in_store(self, settlement: Settlement, tenant: str) -> bool:
        """Settle in the store, together with what else waits there; return whether it took the settlement."""
        drawn = self._drawn.pop(settlement.request_id, None)
        if time.monotonic() < self._spooling_until:
            return False
        try:
            if self._settlements(self._lane(tenant), Closed(settlement=settlement, drawn=drawn)):
                self.audit.settled(settlement.request_id)
        except Unavailable as error:
            self._spooling_until = time.monotonic() + BREAKER_SECONDS
            self._note(error)
            return False
        except Exception:
            log.exception("settlement of %s failed; it is spooled", settlement.request_id)
            return False
        return True

    def _settle_all(self, closed: Sequence[Closed]) -> list[bool | Exception]:
        if time.monotonic() < self._spooling_until:  # they have waited for a group that failed
            raise Unavailable("the metering store does not answer", retry_after=BREAKER_SECONDS)
        done = self._close_rows(closed)
        rest = [one.settlement for one in closed if one.settlement.request_id not in done]
        found = iter(self._settle_in_store(rest) if rest else [])
        return [one.settlement.request_id in done or next(found) for one in closed]

    def _close_rows(self, closed: Sequence[Closed]) -> set[str]:
        """Close rows of requests that have drawn from slices, which get the credit, and return their ids."""
        mine = [
            (one.drawn, fenced.closing(one.settlement, one.drawn))
            for one in closed
            if one.drawn is not None and self._slices.begin_settling(one.drawn)
        ]
        if not mine:
            return set()
        work = partial(fenced.close_rows, closings=[one for _, one in mine], drawn=[drawn for drawn, _ in mine])
        done: set[str] = set()
        try:
            done = self.store.write(work, timeout=SETTLE_TIMEOUT)
        except Unavailable:
            raise
        except Exception:
            log.exception("settlements failed; each is tried by itself")
        finally:  # a row that was not closed may have been closed by an attempt whose answer was lost
            for drawn, one in mine:
                if one.values["request_id"] in done:
                    self._slices.credit(drawn, one.change)
                else:
                    self._slices.doubt(drawn)
        return done

    def _settle_in_store(self, settlements: Sequence[Settlement]) -> list[bool | Exception]:
        try:
            return list(self.store.write(partial(settle_all, settlements=settlements), timeout=SETTLE_TIMEOUT))
        except Unavailable:
            raise
        except Exception as error:  # of one of them
            if len(settlements) == 1:
                return [error]
            return [self._settle_in_store([one])[0] for one in settlements]

    def _settle(self, settlement: Settlement, *, timeout: float | None = None) -> None:
        if settle_in(self.store, settlement, timeout=timeout):
            self.audit.settled(settlement.request_id)

    def _spool(self, owner: LeaseOwner, slot: int | None, settlement: Settlement) -> None:
        try:
            owner.spool.append(settlement)
        except OSError as error:
            if not self._spool_is_full:
                log.error("settlements cannot be spooled (%s); they are kept in memory", error.strerror or error)
            self._spool_is_full = True
            with self._lock:
                self._unspooled.append((owner, slot, settlement))
        else:
            self._spool_is_full = False
            if slot is not None:
                owner.progress.give_back(slot)

    def _ensure_owner(self) -> LeaseOwner:
        with self._lock:
            if self._owner is None or self._owner.pid != os.getpid():
                if self._owner is not None:  # after a fork: the parent's leases stay the parent's
                    self._owner, self._open, self._unspooled, self._thread = None, {}, [], None
                    self._slices, self._drawn, self._lending = Slices(monotonic=self.monotonic), {}, None
                    self._lender = Lender(self.store, self._slices, self._window_clock, self._holder)
                try:
                    self._owner = LeaseOwner(self.state_dir)
                except OSError as error:
                    raise NoRoom(error) from error
            return self._owner

    def maintain(self) -> None:
        """Do one round of upkeep, as ``start`` does every few seconds. Raises ``Unavailable``."""
        try:
            self._maintain()
        except NoRoom as error:
            if not self._spool_is_full:
                log.error("nothing is admitted: %s", error)
            self._spool_is_full = True
            raise
        except Unavailable as error:
            self._note(error)
            raise
        self._note(None)

    def _maintain(self) -> None:
        owner = self._ensure_owner()
        self._settle_unspooled()
        self._follow_clock()
        crash_recovery.heartbeat(self.store, owner.name, self.now_ms(), list(self._open.values()))
        if owner.spool.pending:
            owner.spool.drain(self._settle)
        self.recover()
        self._close_orphans(owner)
        engine_journals.collect(self.store, self.state_dir)
        self.audit.run()
        self._prune_windows()
        self._extend_chain()
        self._open_rows = crash_recovery.count_open(self.store)

    def _prune_windows(self) -> None:
        now = self.monotonic()
        if now - self._pruned_at >= PRUNE_SECONDS:
            self._pruned_at = now
            second = int(self._window_clock.now())
            prune = partial(admission.prune_windows, now=second)
            while self.store.write(prune) == admission.PRUNE_ROWS:
                pass

    def _extend_chain(self) -> None:
        """Link what was settled, unless another process is doing so."""
        for _ in range(MAX_CHAIN_BATCHES):
            if chain.extend(self.store, self.now_ms()) < chain.BATCH_ROWS or self._stop.wait(CHAIN_PAUSE):
                return

    def _settle_unspooled(self) -> None:
        """Try again to settle or spool what is kept in memory; it is kept there until it has been."""
        answers = True
        for kept in list(self._unspooled):
            answers = self._settle_kept(*kept, ask=answers)  # if it fails, it is appended once more
            with self._lock:
                self._unspooled.remove(kept)

    def _close_orphans(self, owner: LeaseOwner) -> None:
        """Close rows of this process that have no lease because their admission ended inside its transaction."""
        orphans = {name: None for name in crash_recovery.open_rows(self.store, owner.name) if name not in self._open}
        for request_id in self._orphans.observe(orphans):
            self._settle(crash_recovery.settlement_of(request_id, self.now_ms()))

    def recover(self) -> int:
        """Settle the open rows of ended processes by their counts so far, and return how many. Safe at any time."""
        return self._recovery.run(self.now_ms())

    def start(self, interval: float = 2.0) -> None:
        """Do a round of upkeep now and every ``interval`` seconds, on a daemon thread (under gevent: a greenlet)."""
        with contextlib.suppress(Unavailable):  # a full disk: upkeep tries again
            self._ensure_owner()
        if self._thread is None:
            self._stop = threading.Event()
            self._thread = threading.Thread(
                target=self._upkeep, args=(interval, self._stop), name="ledger-upkeep", daemon=True
            )
            self._thread.start()
            self.start_lending()

    def start_lending(self) -> None:
        """Do rounds of lending on a daemon thread until the end, which ``start`` does too."""
        if not self.store.takes_turns and self._lending is None:
            self._slices.is_lending = True
            self._lending = threading.Thread(target=self._lend, args=(self._stop,), name="ledger-lending", daemon=True)
            self._lending.start()

    def lend(self) -> bool:
        """Do one round of lending, as ``start`` does several times a second: report what was charged to slices, get and
        return some. Return whether another one is due. Raises ``Unavailable``.

        Only with PostgreSQL, where processes of many hosts share windows; SQLite takes one transaction at a time, and
        each sees all windows.
        """
        if self.store.takes_turns:
            return False
        self._slices.is_lending = not self._is_ending
        return self._lender.round()

    def _lend(self, stop: threading.Event) -> None:
        busy = False
        while not stop.is_set():
            self._slices.wanted.wait(LEND_SECONDS if busy else None)
            busy = True  # if it fails, it is tried again
            try:
                busy = self.lend()
            except NoRoom:
                pass  # upkeep logs it
            except Unavailable as error:
                self._note(error)
            except Exception:
                log.exception("a round of lending failed; it is tried again")
            stop.wait(LENDER_PAUSE)

    def _upkeep(self, interval: float, stop: threading.Event) -> None:
        while True:
            try:
                self.maintain()
            except Unavailable:
                pass  # ``maintain`` has logged it
            except Exception:
                log.exception("ledger upkeep failed; it is tried again")
            if stop.wait(interval):
                return

    def settle_open(self) -> None:
        """Settle every open lease by its counts so far, at the end of the process; from now on nothing is admitted."""
        self._is_ending = True
        for lease in list(self._open.values()):
            lease.settle(finish_reason="error", status="error")

    def close(self) -> None:
        """Stop upkeep; open leases and spooled settlements are left to the next process that runs recovery.

        Nothing is admitted any more.
        """
        self._is_ending = True
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)
        self._thread = None
        self._give_back_slices()
        owner, self._owner = self._owner, None
        if owner is None or owner.pid != os.getpid():
            return
        try:
            self._settle_unspooled()
            owner.spool.drain(lambda settlement: settle_in(self.store, settlement, timeout=SETTLE_TIMEOUT))
            engine_journals.collect(self.store, self.state_dir)
        except Unavailable:
            log.warning("settlements stay in the spool until a process recovers them")
        owner.close(settled=not self._open and not self._unspooled)

    def _give_back_slices(self) -> None:
        """Report what was charged to slices, and return them; if the store does not answer, they end."""
        self._slices.wanted.set()
        if self._lending is not None and self._lending is not threading.current_thread():
            self._lending.join(timeout=10)
        self._lending = None
        self._slices.close()
        if self.store.takes_turns or self._owner is None or self._owner.pid != os.getpid():
            return
        with contextlib.suppress(Unavailable):
            self._lender.round()


def _ending() -> Unavailable:
    return Unavailable("this process is ending", retry_after=BREAKER_SECONDS)


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:  # it was settled just now
        return 0


def _check(reservation: Reservation) -> None:
    if not 0 < len(reservation.request_id.encode()) <= MAX_ID:
        raise InvalidField("request_id", reservation.request_id, f"an id of 1 to {MAX_ID} bytes")
    for name in ("input_tokens", "max_output_tokens"):
        value = getattr(reservation, name)
        if not 0 <= value <= MAX_TOKENS:
            raise InvalidField(name, value, f"an integer from 0 to {MAX_TOKENS}")


def _row(reservation: Reservation, owner: str, started_ms: int, price: Price) -> dict[str, object]:
    return {
        "request_id": reservation.request_id,
        "nonce": secrets.token_hex(8),
        "owner": owner,
        "key_id": reservation.key_id,
        "tenant": reservation.tenant,
        "endpoint": reservation.endpoint,
        "entity": reservation.entity,
        "adapter": reservation.adapter,
        "adapter_hash": reservation.adapter_hash or None,
        "mode": reservation.mode,
        "task": reservation.task,
        "reserved_input": reservation.input_tokens,
        "reserved_output": reservation.max_output_tokens,
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "completion_tokens": 0,
        "price_input": price.input,
        "price_cached": price.cached,
        "price_output": price.output,
        "reserved_cost": cost(
            price, prompt=reservation.input_tokens, cached=0, completion=reservation.max_output_tokens
        ),
        "cost": 0,
        "bucket_milli": 0,
        "prompt_weight_milli": reservation.bucket.prompt_weight_milli if reservation.bucket else 0,
        "started_ms": started_ms,
        "status": "open",
        "model_version": reservation.model.label or None,
        "content_hash": reservation.model.content_hash or None,
        "end_user": reservation.labels.user or None,
        "client_request_id": reservation.labels.client_request_id or None,
        "tags": reservation.labels.tags or None,
        "limited_user": reservation.limited_user or None,
        "proof": None,
    }
