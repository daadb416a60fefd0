"""SQLite's file is deleted, or replaced, under a process that has it open."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from ledger_rows import end_breaker, rows_of

from mlflow_llm.serving.interface.errors import PermissionDenied, Unavailable
from mlflow_llm.serving.metering import Ledger, Limits, Store
from mlflow_llm.serving.metering.accounts.limits import check_integrity

TAILS = ("-wal", "-shm")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serving.db"


@pytest.fixture
def ledger(file: Path, tmp_path: Path, clock):
    store = Store(f"sqlite:///{file}")
    opened = Ledger(store, state_dir=tmp_path / "state", clock=clock, monotonic=clock)
    yield opened
    opened.close()
    store.close()


def backup(file: Path, to: Path) -> Path:
    """Back the database up like ``sqlite3 serving.db ".backup …"``."""
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(to)) as target:
        source.backup(target)
    return to


def replace(file: Path, by: Path) -> None:
    for tail in TAILS:
        Path(f"{file}{tail}").unlink(missing_ok=True)
    os.replace(by, file)


def test_a_backup_that_is_put_back_is_what_counts_from_then_on(ledger, file, tmp_path, reserve_of) -> None:
    """A restored backup bills the running requests that it knows, and other processes' changes to it apply."""
    running = ledger.reserve(reserve_of("running"))
    copy = backup(file, tmp_path / "backup.db")
    ledger.reserve(reserve_of("forgotten")).settle(completion=1)
    replace(file, copy)
    ledger.reserve(reserve_of("new")).settle(completion=2)
    running.settle(completion=3)
    ledger.maintain()
    with closing(sqlite3.connect(file)) as there:
        found = dict(there.execute("SELECT request_id, completion_tokens FROM ledger"))
    assert found == {"running": 3, "new": 2}
    with closing(Store(f"sqlite:///{file}")) as other:
        Limits(other).set("tenant", "acme", "in_flight", 0)
    with pytest.raises(PermissionDenied, match="in_flight"):
        ledger.reserve(reserve_of("refused"))
    check_integrity(ledger.store)


def test_nothing_is_admitted_while_the_file_is_gone(ledger, file, reserve_of, caplog) -> None:
    """While the database file is missing nothing is admitted or created, settlements are spooled, and the reason is
    logged once.
    """
    running = ledger.reserve(reserve_of("running"))
    away = file.with_name("away.db")
    file.rename(away)
    for _ in range(2):
        with pytest.raises(Unavailable):
            ledger.reserve(reserve_of("new"))
        end_breaker(ledger)
    with pytest.raises(Unavailable):
        ledger.check(key_id="key_1", tenant="acme", endpoint="chat", entities=None, generates=True)
    end_breaker(ledger)
    running.settle(completion=3)
    with pytest.raises(Unavailable):
        ledger.maintain()
    assert not file.exists()
    assert [record.message for record in caplog.records] == [
        f"the metering store does not answer (there is no file {file} any more); settlements wait in the spool"
    ]
    away.rename(file)
    end_breaker(ledger)
    ledger.maintain()
    assert caplog.records[-1].message == "the metering store answers again"
    assert rows_of(ledger.store)["running"].completion_tokens == 3
    ledger.reserve(reserve_of("new")).settle()
    check_integrity(ledger.store)


def test_another_store_is_not_taken_for_this_one(ledger, file, tmp_path, reserve_of, caplog) -> None:
    """A new database in the file's place has neither its keys nor its rows: a new process is to begin with it."""
    running = ledger.reserve(reserve_of("running"))
    original = backup(file, tmp_path / "original.db")
    other = Store(f"sqlite:///{tmp_path / 'other.db'}")
    Ledger(other, state_dir=tmp_path / "state").close()
    other.close()
    replace(file, tmp_path / "other.db")
    with pytest.raises(Unavailable):
        ledger.reserve(reserve_of("new"))
    end_breaker(ledger)
    running.settle(completion=3)
    assert f"{file} is another store than the one that this process began with" in caplog.text
    with closing(sqlite3.connect(file)) as there:
        assert there.execute("SELECT count(*) FROM ledger").fetchone() == (0,)
    replace(file, original)
    end_breaker(ledger)
    ledger.maintain()
    assert {name: row.completion_tokens for name, row in rows_of(ledger.store).items()} == {"running": 3}


def test_a_file_that_is_not_a_database_is_logged(ledger, file, reserve_of, caplog) -> None:
    """If the file is not a database the reason is logged and requests are refused."""
    ledger.reserve(reserve_of("r1")).settle()
    kept = backup(file, file.with_name("kept.db"))
    broken = file.with_name("broken.db")
    broken.write_bytes(b"SQLite format 3\0" + b"x" * 8192)
    shutil.copystat(kept, broken)
    replace(file, broken)
    with pytest.raises(Unavailable):
        ledger.reserve(reserve_of("r2"))
    assert re.search(r"does not answer \(.*database.*\)", caplog.text)
    replace(file, kept)
    end_breaker(ledger)
    ledger.reserve(reserve_of("r2")).settle()
    assert set(rows_of(ledger.store)) == {"r1", "r2"}
