"""The clock of a store, by which its windows are charged: one for all hosts, whatever their own clocks say.

PostgreSQL has a clock. SQLite has none: its processes are on one host, and share the time of the first of them since
the host was started, which the store keeps with the host's boot. A time before the newest one that the store has seen
is wrong on every database.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa
from msgspec import Struct

from ...interface.errors import Unavailable
from ..accounts.monotonic_clock import since_boot
from ..store.store import Store
from ..store.tables import settings

NAME = "clock"  # of the setting with SQLite's reference
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_database_now = sa.select(sa.extract("epoch", sa.func.clock_timestamp()))
_find = sa.select(settings.c.value).where(settings.c.name == NAME)


class ClockReading(Struct, frozen=True, kw_only=True):
    """The store's time when the host's monotonic clock said ``at``, and the seconds by which the host's wall clock is
    ahead of it."""

    store: float
    at: float
    ahead: float


class StoreClock:
    """The clock of ``store`` as this host reads it. ``max_skew`` is how far the host's own may be from it."""

    def __init__(
        self,
        store: Store,
        max_skew: float,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = since_boot,
        boot: Callable[[], str] = lambda: boot_id(),
    ) -> None:
        self.max_skew = max_skew
        self._store, self._wall, self._monotonic, self._boot = store, wall, monotonic, boot

    def read(self) -> ClockReading:
        """Return the store's time. Raises ``Unavailable``."""
        return self._read_postgresql() if self._store.has_clock else self._read_sqlite()

    def check(self) -> ClockReading:
        """Return the store's time. Raises ``Unavailable`` if the host's clock is further from it than allowed."""
        reading = self.read()
        if message := self.refusal(reading):
            raise Unavailable(message)
        return reading

    def refusal(self, reading: ClockReading) -> str:
        """Return why nothing is admitted by the host's clock, "" if it is right."""
        if abs(reading.ahead) <= self.max_skew:
            return ""
        way = "ahead of" if reading.ahead > 0 else "behind"
        mend = "set the host's clock"
        if not self._store.has_clock:
            mend += ", or, if it is right and was wrong before, run 'mlflow-llm windows repair'"
        return (
            f"the clock of this host is {abs(reading.ahead):.0f} s {way} that of the database, and max_clock_skew is "
            f"{self.max_skew:g} s: {mend}"
        )

    def _read_postgresql(self) -> ClockReading:
        def ask(connection: sa.Connection) -> ClockReading:
            connection.execute(sa.select(1))  # a connection may have to be made first
            before = self._monotonic()
            found = float(connection.execute(_database_now).scalar_one())
            after = self._monotonic()
            wall = self._wall() - (self._monotonic() - after)
            at = (before + after) / 2
            return ClockReading(store=found, at=at, ahead=wall - (after - at) - found)

        return self._store.read(ask, timeout=2.0)

    def _read_sqlite(self) -> ClockReading:
        kept = self._store.read(lambda connection: connection.execute(_find).scalar_one_or_none(), timeout=2.0)
        now, wall, boot = self._monotonic(), self._wall(), self._boot()
        if kept is None:
            self.set(wall)
            return ClockReading(store=wall, at=now, ahead=0.0)
        kept_boot, kept_at, kept_time = kept.split(" ")
        expected = float(kept_time) + (now - float(kept_at) if kept_boot == boot else 0.0)
        if kept_boot == boot:
            return ClockReading(store=expected, at=now, ahead=wall - expected)
        if wall < expected - self.max_skew:  # the host was started again, and knows that this much time has passed
            return ClockReading(store=expected, at=now, ahead=wall - expected)
        self.set(wall)
        return ClockReading(store=wall, at=now, ahead=0.0)

    def set(self, now: float) -> None:
        """Make ``now`` the store's time, on SQLite."""
        value = f"{self._boot()} {self._monotonic():.6f} {now:.6f}"
        insert = self._store.insert(settings).values(name=NAME, value=value)
        update = insert.on_conflict_do_update(index_elements=["name"], set_={"value": value})
        self._store.write(lambda connection: connection.execute(update))


def boot_id() -> str:
    """Return what names this start of the host; without one, every reading is of a host that was started again."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"
