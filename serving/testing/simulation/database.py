"""The database of a schedule: SQLite in memory's file system, behind connections that fail as a seed says.

Its transactions are SQLite's own. What fails is the way there: a statement is refused as busy, takes seconds, or cuts
the connection; a commit is made and its answer is lost, or it is not made; a transaction whose caller has given up is
committed later all the same.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ...metering.store.identity import ensure_identity
from ...metering.store.store import Store
from ...metering.store.tables import metadata
from .hosts import Process
from .machine import Machine
from .translation import add_functions, translated

T = TypeVar("T")
_KEPT = {"identity", "prices", "audit"}
IDLE_SECONDS = 3.0
"""For so long the database holds the transaction of a connection whose client it lost."""


class Cut(sqlite3.OperationalError):
    """The error of a connection that is gone."""


class Faults:
    """The probabilities with which a statement, a commit or a transaction fails on its way."""

    busy = 0.0
    slow = 0.0
    cut = 0.0
    answer_lost = 0.0
    commit_lost = 0.0
    stuck = 0.0
    """The caller of a transaction gives up before it has run."""

    def stop(self) -> None:
        for name in ("busy", "slow", "cut", "answer_lost", "commit_lost", "stuck"):
            setattr(self, name, 0.0)


class Database:
    """The database, over all schedules of this process. ``version`` counts commits that changed something."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "ledger.db"
        self.machine: Machine | None = None
        self.faults = Faults()
        self.away_until = 0.0
        self.has_clock = False
        self.version = 0
        self._free: list[Store] = []
        self._lent: list[Store] = []
        self._connections: list[_Connection] = []
        self.store = Store(f"sqlite:///{self.path}")
        self._identity = ensure_identity(self.store).store_id  # what a first schedule made, later ones would find
        self._observer = sqlite3.connect(self.path, isolation_level=None)
        self._observer.row_factory = sqlite3.Row

    def begin(self, machine: Machine, *, has_clock: bool) -> None:
        """Empty the database for a schedule; with ``has_clock`` it has one for all hosts and lends slices of limits, as
        on PostgreSQL."""
        for store in self._lent:
            store.engine.dispose()
        for connection in self._connections:
            connection.end()
        self._connections.clear()
        self._free, self._lent = self._free + self._lent, []
        self._observer.execute("BEGIN IMMEDIATE")
        for table in reversed(metadata.sorted_tables):
            if table.name not in _KEPT:
                self._observer.execute(f"DELETE FROM {table.name}")
        self._observer.execute("COMMIT")
        self.machine, self.faults, self.away_until, self.has_clock = machine, Faults(), 0.0, has_clock
        self.store.has_clock, self.store.takes_turns = has_clock, not has_clock
        self.version = 0

    def query(self, sql: str) -> list[sqlite3.Row]:
        """Look at the database from outside of the schedule."""
        return self._observer.execute(sql).fetchall()

    def lend(self, process: Process) -> Store:
        """Return a store as ``process`` opens it; its connections end with the process."""
        opened = self._free.pop() if self._free else self._open()
        self._lent.append(opened)
        opened.engine.dispose()
        opened.has_clock, opened.takes_turns = self.has_clock, not self.has_clock
        return opened

    def _open(self) -> Store:
        opened = Store(f"sqlite:///{self.path}", run=self._run)
        opened.expect(self._identity)
        opened.engine.dispose()
        sa.event.listen(opened.engine, "do_connect", self._connect)
        sa.event.listen(opened.engine, "handle_error", _note_disconnect)
        return opened

    def _connect(self, _dialect: Any, _record: Any, _args: Any, _parameters: Any) -> sqlite3.Connection:
        assert self.machine is not None
        process = self.machine.seam()
        self._check_way(process)
        connection = sqlite3.connect(self.path, timeout=0, check_same_thread=False, factory=_Connection)
        add_functions(connection)
        connection.database = self
        self._connections.append(connection)
        if process is not None:
            process.at_end.append(connection.lose)
            connection.process = process
        return connection

    def _check_way(self, process: Process | None) -> None:
        assert self.machine is not None
        now = self.machine.scheduler.now
        if now < self.away_until or (process is not None and now < process.host.cut_until):
            raise Cut("the server does not answer")

    def _run(self, attempt: Callable[[], T], *, read: bool, seconds: float | None) -> T:
        """Run ``attempt`` as a thread of the calling process: its caller can end, or give up, before it does."""
        assert self.machine is not None
        scheduler = self.machine.scheduler
        actor = scheduler.current
        if actor is None:
            return attempt()
        thread = scheduler.spawn(f"{actor.name}/{'read' if read else 'write'}", actor.process, attempt)
        if not read and scheduler.draw.random() < self.faults.stuck:
            thread.is_waiting, thread.wakes_at = True, scheduler.now + scheduler.draw.uniform(0.0, 40.0)
        if not scheduler.wait(lambda: thread.is_done, seconds):
            raise PoolTimeout("the store is stuck")
        if thread.error is not None:
            raise thread.error
        found: T = thread.result
        return found

    def before(self, connection: _Connection, sql: str) -> None:
        """Do what happens to a statement on its way. Raises ``sqlite3.OperationalError``."""
        machine = self.machine
        assert machine is not None
        machine.seam()
        draw, faults = machine.scheduler.draw, self.faults
        if connection.is_cut:
            raise Cut("the connection is gone")
        fate = draw.random()
        try:
            self._check_way(connection.process)
            if fate < faults.cut:
                raise Cut("the connection was reset")
        except Cut:
            self._cut(connection)
            raise
        if fate < faults.cut + faults.slow:
            machine.scheduler.sleep(draw.expovariate(0.5))
        elif fate < faults.cut + faults.slow + faults.busy and sql.startswith("BEGIN"):
            raise sqlite3.OperationalError("database is locked")

    def commit(self, connection: _Connection, commit: Callable[[], None]) -> None:
        """Do what happens to a commit on its way there and back. Raises ``Cut``."""
        machine = self.machine
        assert machine is not None
        machine.seam()
        draw, faults = machine.scheduler.draw, self.faults
        fate = draw.random()
        try:
            self._check_way(connection.process)
        except Cut:
            self._cut(connection)
            raise
        if fate < faults.commit_lost:
            self._cut(connection)
            raise Cut("the connection was reset during a commit")
        changed = connection.total_changes != connection.changes
        commit()
        self.version += changed
        machine.seam()
        if fate < faults.commit_lost + faults.answer_lost:
            self._cut(connection)
            raise Cut("the answer to a commit was lost")

    def _cut(self, connection: _Connection) -> None:
        """Cut a connection: the database rolls its transaction back, at once or when it notices."""
        assert self.machine is not None
        scheduler = self.machine.scheduler
        connection.is_cut = True
        process = connection.process
        if process is None or not connection.in_transaction or scheduler.draw.random() < 0.7:
            connection.lose()
            return

        def notice() -> None:
            scheduler.sleep(IDLE_SECONDS)
            connection.lose()

        scheduler.spawn("server/notice", process, notice)

    def now(self) -> float:
        assert self.machine is not None
        return self.machine.scheduler.now

    def close(self) -> None:
        for store in (*self._free, *self._lent, self.store):
            store.close()
        self._observer.close()


class _Connection(sqlite3.Connection):
    """A connection of a simulated process. ``changes`` is the number of changed rows when its transaction began."""

    database: Database
    process: Process | None = None
    is_cut = False
    is_lost = False
    changes = 0

    def cursor(self, factory: Any = None) -> Any:
        return super().cursor(factory or _Cursor)

    def commit(self) -> None:
        if self.in_transaction and not self.is_cut:
            self.database.commit(self, super().commit)
        elif self.is_cut:
            raise Cut("the connection is gone")

    def rollback(self) -> None:
        if not self.is_cut and not self.is_lost:
            super().rollback()

    def close(self) -> None:
        self.lose()

    def lose(self) -> None:
        """End the connection as the database sees it: what was not committed is rolled back."""
        if not self.is_lost:
            self.is_cut = self.is_lost = True
            super().rollback()

    def end(self) -> None:
        """Close it for the simulator's own sake, when nothing uses it any more."""
        super().close()


class _Cursor(sqlite3.Cursor):
    """A cursor whose statements go the way to the database."""

    connection: _Connection

    def execute(self, sql: str, parameters: Any = ()) -> _Cursor:
        connection = self.connection
        if not sql.startswith("PRAGMA"):
            connection.database.before(connection, sql)
        if "clock_timestamp" in sql:  # SQLite has none
            sql, parameters = "SELECT ?", (connection.database.now(),)
        if sql.startswith("BEGIN"):
            connection.changes = connection.total_changes
        super().execute(translated(sql), parameters)
        return self

    def executemany(self, sql: str, parameters: Any) -> _Cursor:
        self.connection.database.before(self.connection, sql)
        super().executemany(sql, parameters)
        return self


def _note_disconnect(context: Any) -> None:
    if isinstance(context.original_exception, Cut):
        context.is_disconnect = True
