from __future__ import annotations

import sqlite3
import threading

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from mlflow_llm.serving.metering.store.connection_pool import ConnectionPool


class Database:
    """A database that records opened connections; while ``broken`` none can be opened."""

    def __init__(self) -> None:
        self.opened: list[sqlite3.Connection] = []
        self.broken = False

    def connect(self) -> sqlite3.Connection:
        if self.broken:
            raise sqlite3.OperationalError("unable to open database file")
        self.opened.append(sqlite3.connect(":memory:", check_same_thread=False))
        return self.opened[-1]

    def engine(self, **options: float) -> sa.Engine:
        return sa.create_engine("sqlite://", creator=self.connect, poolclass=ConnectionPool, **options)


@pytest.fixture
def database() -> Database:
    return Database()


def is_open(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("SELECT 1")
    except sqlite3.ProgrammingError:
        return False
    return True


def test_the_most_recently_used_connection_is_reused(database):
    """The connection that was used last is used again."""
    engine = database.engine(pool_size=3, kept=3, pool_timeout=0)
    with engine.connect() as last, engine.connect():
        expected = last.connection.dbapi_connection
    for _ in range(5):
        with engine.connect() as connection:
            assert connection.connection.dbapi_connection is expected
    assert len(database.opened) == 2
    assert engine.pool.status() == "0 of 3 connections in use, 2 open"


def test_returned_connections_beyond_kept_are_closed(database):
    """Returned connections beyond the number to keep are closed."""
    engine = database.engine(pool_size=4, kept=1, pool_timeout=0)
    with engine.connect(), engine.connect(), engine.connect():
        assert engine.pool.status() == "3 of 4 connections in use, 0 open"
    assert sorted(map(is_open, database.opened)) == [False, False, True]


def test_size_is_the_limit_and_waiters_get_returned_connections(database):
    """The pool opens no more connections than its size, and a waiting thread gets one that is returned."""
    engine = database.engine(pool_size=1, kept=1, pool_timeout=0)
    with engine.connect(), pytest.raises(PoolTimeout, match="all 1 connections are in use"):
        engine.connect()
    patient = database.engine(pool_size=1, kept=1, pool_timeout=60)
    held = patient.connect()
    served = []
    waiting = threading.Thread(target=lambda: served.append(patient.connect()))
    waiting.start()
    held.close()
    waiting.join(240)
    assert len(served) == 1


def test_a_failed_connection_frees_its_slot(database):
    """A connection that failed to open, or was invalidated, leaves its slot free."""
    engine = database.engine(pool_size=1, kept=1, pool_timeout=0)
    database.broken = True
    for _ in range(3):
        with pytest.raises(OperationalError, match="unable to open"):
            engine.connect()
    database.broken = False
    with engine.connect() as connection:
        connection.invalidate()
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar_one() == 1


def test_dispose_closes_connections_and_starts_over(database):
    """Disposing of the engine closes open connections, after which the pool opens new ones up to its size."""
    engine = database.engine(pool_size=2, kept=2, pool_timeout=0)
    with engine.connect():
        pass
    engine.dispose()
    assert not is_open(database.opened[0])
    with engine.connect(), engine.connect(), pytest.raises(PoolTimeout):
        engine.connect()


def test_many_threads_never_share_a_connection(database):
    """Six threads with a pool of three never share a connection."""
    engine = database.engine(pool_size=3, kept=2, pool_timeout=60)
    using: list[sqlite3.Connection] = []
    shared = []

    def use() -> None:
        for _ in range(100):
            with engine.connect() as connection:
                own = connection.connection.dbapi_connection
                if own in using or len(using) >= 3:
                    shared.append(own)
                using.append(own)
                connection.exec_driver_sql("SELECT 1").all()
                using.remove(own)

    threads = [threading.Thread(target=use) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert shared == []
    assert engine.pool.status().startswith("0 of 3 connections in use")
