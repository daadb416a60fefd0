"""The SQL database of all metering: SQLite in WAL mode by default, PostgreSQL by URL.

``write`` runs a function in one read-write transaction and repeats it from the start while the database is busy, so the
function must have no other effects. On SQLite a write begins with BEGIN IMMEDIATE, so that writers run one after
another across threads and processes. On PostgreSQL it runs at READ COMMITTED, and callers lock the rows that they
check, always in the order ledger, windows (sorted), buckets.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ...interface.errors import Unavailable
from ...system.backoff import Backoff
from . import checks
from .checks import NoStore
from .connection_pool import ConnectionPool
from .sqlite_file import SqliteFile
from .statements import begin

T = TypeVar("T")


class Runner(Protocol):
    """A runner of one attempt of a transaction, on this thread or another; it returns or raises what ``attempt`` does.

    A runner that uses another thread may raise ``sqlalchemy.exc.TimeoutError`` after ``seconds``; the attempt may still
    be committed.
    """

    def __call__(self, attempt: Callable[[], T], *, read: bool, seconds: float | None) -> T: ...


def here(attempt: Callable[[], T], *, read: bool, seconds: float | None) -> T:
    """Run an attempt on the calling thread; this is the default ``Runner``."""
    return attempt()


def _always(_error: Exception) -> bool:
    return True


BUSY_TIMEOUT_MS = 20
"""How long SQLite itself waits for a lock. Short, because it holds a thread; ``write`` sleeps between attempts."""

STUCK_SECONDS = 5.0
"""How long beyond a transaction's own timeout its answer is waited for: a disk may hang, or whatever runs it."""

_PATIENCE = {
    "connect_timeout": 2,
    "tcp_user_timeout": 4000,
    "options": "-c lock_timeout=2000 -c idle_in_transaction_session_timeout=10000",
}
"""PostgreSQL's: seconds to connect, ms until a silent network is an error, ms for a row lock and for a stuck client."""

_MIGRATION_LOCK = 0x6D6C6C6D  # the key of PostgreSQL's advisory lock, an arbitrary constant
_READ = "mlflow_llm_read"
_inherited: list[Any] = []  # pools of a parent process: closing its SQLite handles after a fork would be unsafe


class Store:
    """A metering store: ``Store("sqlite:///path")``, ``Store("postgresql://…")``.

    ``?synchronous=FULL`` in a SQLite URL makes every commit survive a power failure (NORMAL, the default, survives the
    end of any process). Opening a store migrates its schema, and creates it unless ``make`` is False; many processes
    may open a new database at once. ``run`` determines where transactions run: an event loop passes a runner that uses
    threads (``store_threads``). Raises ``NoStore`` if there can be no store at the URL, and ``Unavailable`` if
    others hold it for too long. With ``patient``, for callers who know that the database exists, it also waits for one
    that does not answer.
    """

    def __init__(
        self, url: str, *, timeout: float = 5.0, run: Runner = here, make: bool = True, patient: bool = False
    ) -> None:
        parsed = checks.parsed(url)
        self.timeout = timeout
        self._run = run
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self.has_clock = not self.is_sqlite
        """Whether the database has a clock, which is then that of all hosts."""
        self.takes_turns = self.is_sqlite
        """Whether it runs one writing transaction at a time, so that lending parts of limits would spare nothing."""
        self._synchronous = str(parsed.query.get("synchronous", "NORMAL")).upper()
        if self._synchronous not in {"NORMAL", "FULL", "EXTRA"}:
            raise NoStore(url, f"synchronous: {self._synchronous!r} is not NORMAL, FULL or EXTRA")
        if self.is_sqlite and (unknown := sorted(parsed.query.keys() - {"synchronous"})):
            raise NoStore(url, f"{unknown[0]}: no such parameter; expected synchronous")
        self._file: SqliteFile | None = None
        self._is_ours = False  # set when its revision is known: another program's file is left unchanged
        with checks.named(url):
            if self.is_sqlite:
                checks.check_file(parsed, make=make)
            self.engine = self._open(parsed.difference_update_query(["synchronous"]))
            stores.add(self)
            try:
                self._migrate(make=make, hopeful=_always if patient else checks.is_transient)
            except BaseException:
                self.close()
                raise

    def _open(self, url: sa.URL) -> sa.Engine:
        if not self.is_sqlite:
            # few connections: transactions take milliseconds and wait for each other at the windows' row locks anyway
            engine = sa.create_engine(
                url,
                poolclass=ConnectionPool,
                pool_size=12,
                kept=12,
                pool_timeout=2.0,
                # not asked before each use whether they live: ``_retry`` takes another one
                connect_args=_PATIENCE | {"autocommit": True},  # transactions begin in ``statements``
            )
            sa.event.listen(engine, "before_cursor_execute", begin)
            return engine
        engine = sa.create_engine(
            url,
            poolclass=ConnectionPool,
            pool_size=64,
            kept=4,
            pool_timeout=2.0,
            connect_args={"timeout": BUSY_TIMEOUT_MS / 1000, "check_same_thread": False},
        )
        sa.event.listen(engine, "connect", self._prepare)
        sa.event.listen(engine, "begin", _begin)
        self._file = SqliteFile(engine, str(url.database))
        return engine

    def _prepare(self, connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions begin in ``_begin``, even before DDL
        cursor = connection.cursor()
        lasting = ("journal_mode=WAL",) if self._is_ours else ()
        for pragma in (*lasting, f"synchronous={self._synchronous}", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    def _migrate(self, *, make: bool, hopeful: Callable[[Exception], bool]) -> None:
        known = checks.revisions()
        head, patience = known[-1], 6 * self.timeout

        def current(connection: sa.Connection) -> str | None:
            return checks.revision(connection, known)

        def upgrade(connection: sa.Connection) -> None:
            if not self.is_sqlite:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            if current(connection) != head:
                _upgrade(connection)

        found = self._retry(current, patience, read=True, hopeful=hopeful)
        if found is None and not make:
            raise ValueError("there is no metering store in it; serve, keys create, limits set and prices set make one")
        self._is_ours = True
        self.engine.dispose()  # the next connections are prepared as ours
        # the first connection is also made here, while there is no other: SQLAlchemy takes a lock (``ConnectionPool``)
        if self._retry(current, patience, read=True, hopeful=hopeful) != head:
            import_module("alembic.command")  # it takes long, and PostgreSQL ends transactions that are idle
            self._retry(upgrade, patience, read=False, hopeful=hopeful)

    def write(self, work: Callable[[sa.Connection], T], *, timeout: float | None = None) -> T:
        """Run ``work`` in a transaction and commit it; an exception from ``work`` rolls back and is passed on."""
        return self._retry(work, timeout, read=False)

    def read(self, work: Callable[[sa.Connection], T], *, timeout: float | None = None) -> T:
        return self._retry(work, timeout, read=True)

    def _transact(self, work: Callable[[sa.Connection], T], *, read: bool) -> T:
        with self.engine.connect() as connection:
            if read:
                connection = connection.execution_options(**{_READ: True})
            with connection.begin():
                return work(connection)

    def _retry(
        self,
        work: Callable[[sa.Connection], T],
        timeout: float | None,
        *,
        read: bool,
        hopeful: Callable[[Exception], bool] = _always,
    ) -> T:
        until = time.monotonic() + (self.timeout if timeout is None else timeout)
        stuck = None if timeout is None else timeout + STUCK_SECONDS  # callers without a timeout read or write a lot
        backoff = Backoff(0.001, 0.05, jitter=(0.5, 1.5))

        def attempt() -> T:
            if time.monotonic() > until:  # all of the time was spent waiting for others, for which the store was slow
                raise PoolTimeout("the store is busy")
            return self._transact(work, read=read)

        reason: Exception | None = None
        while True:
            try:
                return self._run(attempt, read=read, seconds=stuck)
            except (IntegrityError, ProgrammingError, DataError):
                raise
            except (DBAPIError, PoolTimeout) as error:
                if not hopeful(error):
                    raise
                if reason is None or not isinstance(error, PoolTimeout):  # a timeout only says that no time was left
                    reason = error
                if time.monotonic() + backoff.pause > until:
                    raise Unavailable("the metering store does not answer", retry_after=1.0) from reason
            time.sleep(backoff.failed())

    def expect(self, store_id: str) -> None:
        """Reject from now on any other store that replaces this one's file while the process runs."""
        if self._file is not None:
            self._file.store_id = store_id

    def insert(self, table: sa.Table) -> Any:
        """Return the dialect's INSERT, which has ``on_conflict_do_nothing`` and ``on_conflict_do_update``."""
        return sqlite.insert(table) if self.is_sqlite else postgresql.insert(table)

    def lock_ledger(self, connection: sa.Connection) -> None:
        """Block all reservations and settlements until this transaction ends. SQLite blocks other writers anyway."""
        if not self.is_sqlite:
            connection.exec_driver_sql("LOCK TABLE ledger IN SHARE ROW EXCLUSIVE MODE")

    def close(self) -> None:
        self.engine.dispose()


def _upgrade(connection: sa.Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(checks.MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _begin(connection: sa.Connection) -> None:
    read = connection.get_execution_options().get(_READ, False)
    connection.exec_driver_sql("BEGIN" if read else "BEGIN IMMEDIATE")


stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(stores):
        _inherited.append(store.engine.pool)
        store.engine.dispose(close=False)


os.register_at_fork(after_in_child=_after_fork)
