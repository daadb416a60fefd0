"""Whose a process's records are: each store's own, also where one is a copy of the other."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from ledger_rows import bury, rows_of, spool_settlements
from postgres_databases import new_database

from mlflow_llm.serving import metering
from mlflow_llm.serving.interface.errors import AlreadyExists
from mlflow_llm.serving.interface.events import Tokens
from mlflow_llm.serving.interface.request import Sequence, ValidRequest
from mlflow_llm.serving.metering import Ledger, Store
from mlflow_llm.serving.metering.ledger.offline_settlement import settle_ended
from mlflow_llm.serving.metering.store.identity import ensure_identity
from mlflow_llm.serving.system.journal import Journal
from mlflow_llm.serving.transport.engine_process.journal import MeteredRequests


@pytest.fixture
def other_url(store_url, tmp_path, request):
    """Return the URL of a second database of the same kind."""
    if store_url.startswith("sqlite"):
        return f"sqlite:///{tmp_path}/other.db"
    return new_database(request.getfixturevalue("postgres_server"))


@pytest.fixture
def opened():
    """Return an opener of ledgers; all are closed with their stores at the end."""
    ledgers = []

    def open_ledger(url: str, root: Path, **clocks) -> Ledger:
        ledgers.append(Ledger(Store(url), state_dir=root, **clocks))
        return ledgers[-1]

    yield open_ledger
    for ledger in ledgers:
        ledger.close()
        ledger.store.close()


def copy(source: str, target: str) -> None:
    """Copy a database as an administrator would: cp of SQLite's file, or pg_dump and restore."""
    if source.startswith("sqlite"):
        with closing(sqlite3.connect(source.removeprefix("sqlite:///"))) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        shutil.copy(source.removeprefix("sqlite:///"), target.removeprefix("sqlite:///"))
        return
    plain = [url.replace("+psycopg", "") for url in (source, target)]
    dumped = subprocess.run(["pg_dump", plain[0]], check=True, capture_output=True)
    subprocess.run(["psql", "-q", "-v", "ON_ERROR_STOP=1", plain[1]], input=dumped.stdout, check=True)


def half_done(ledger: Ledger, reserve_of, name: str) -> None:
    """Leave a request of a killed process, a spooled settlement and an engine's counts."""
    ledger.reserve(reserve_of(f"{name}-ran")).count(5)
    spooled = ledger.reserve(reserve_of(f"{name}-spooled"))
    spool_settlements(ledger)
    spooled.settle(completion=9, finish_reason="length")
    journal = Journal(ledger.journal_dir, f"engine-{name}")
    for what, tokens in (("ran", 7), ("spooled", 9)):
        entry = journal.begin(f"{name}-{what}")
        journal.count(entry, tokens)
    journal.close()
    bury(ledger)


def request_of(request_id: str) -> ValidRequest:
    return ValidRequest(request_id=request_id, task="chat", model="m", sequences=(Sequence(prompt_token_ids=(1,)),))


def counts(store: Store) -> dict[str, tuple[int, int, str]]:
    rows = rows_of(store)
    return {name: (row.completion_tokens, row.generated_tokens, row.status) for name, row in rows.items()}


def exact(name: str) -> dict[str, tuple[int, int, str]]:
    return {f"{name}-ran": (5, 7, "recovered"), f"{name}-spooled": (9, 9, "ok")}


def test_a_store_settles_its_own_and_nothing_else(store_url, other_url, tmp_path, opened, reserve_of):
    """Each of two stores in one state directory settles only its own processes' requests, whoever starts first."""
    root = tmp_path / "state"
    half_done(opened(store_url, root), reserve_of, "production")
    half_done(opened(other_url, root), reserve_of, "staging")
    staging = opened(other_url, root)
    staging.maintain()
    assert counts(staging.store) == exact("staging")
    production = opened(store_url, root)
    production.maintain()
    assert counts(production.store) == exact("production")
    assert [path for ledger in (staging, production) for path in ledger.journal_dir.iterdir()] == []


def test_a_copy_is_another_store(store_url, other_url, tmp_path, opened, reserve_of):
    """A copied database gets an identity of its own: it neither takes nor removes what the original's processes left,
    and closes the rows that were open when it was copied once nobody was heard of for a minute."""
    root, now = tmp_path / "state", [1000.0]
    original = opened(store_url, root)
    original.maintain()
    running = original.reserve(reserve_of("running"))
    running.count(3)
    original.maintain()
    copy(store_url, other_url)
    half_done(original, reserve_of, "late")
    copied = opened(other_url, root, monotonic=lambda: now[0])
    assert copied.state_dir != original.state_dir
    assert opened(other_url, root).state_dir == copied.state_dir
    copied.maintain()
    assert counts(copied.store) == {"running": (3, 0, "open")}
    now[0] += 61
    copied.maintain()
    assert counts(copied.store) == {"running": (3, 0, "recovered")}
    successor = opened(store_url, root)
    successor.maintain()
    assert counts(successor.store) == exact("late") | {"running": (3, 0, "recovered")}


def test_a_moved_store_takes_over_what_is_left(store_url, other_url, tmp_path, opened, reserve_of):
    """A copied store takes over the original's requests on request, unless a process of the original lives."""
    root = tmp_path / "state"
    first, second = opened(store_url, root), opened(store_url, root)
    first.maintain()
    running = second.reserve(reserve_of("running"))
    half_done(first, reserve_of, "late")
    copy(store_url, other_url)
    moved = opened(other_url, root)
    with pytest.raises(AlreadyExists, match="in use"):
        settle_ended(moved.store, root, moved=True, wait=lambda seconds: None)
    assert {status for _, _, status in counts(moved.store).values()} == {"open"}
    running.settle(completion=2)
    bury(second)
    settled = settle_ended(moved.store, root, moved=True, wait=lambda seconds: None)
    assert counts(moved.store) == exact("late") | {"running": (0, 0, "recovered")}
    assert (settled.rows, settled.living) == (3, 0)


def test_settling_without_a_server(store_url, tmp_path, opened, reserve_of):
    """Settling without a server closes ended processes' requests exactly and leaves those of living processes open."""
    root = tmp_path / "state"
    here, there, gone = opened(store_url, root), opened(store_url, tmp_path / "b"), opened(store_url, tmp_path / "c")
    leases = []
    for number, ledger in enumerate((here, there, gone)):
        leases.append(ledger.reserve(reserve_of(f"r{number}")))
        leases[-1].count(2)
        ledger.maintain()
    half_done(opened(store_url, root), reserve_of, "dead")
    watched = []

    def wait(seconds: float) -> None:
        there.maintain()

    settled = settle_ended(here.store, root, watching=watched.append, wait=wait)
    assert (settled.rows, settled.living, watched) == (3, 2, [2])
    kept = {"r0": (2, 0, "open"), "r1": (2, 0, "open"), "r2": (2, 0, "recovered")}
    assert counts(here.store) == exact("dead") | kept
    for lease in leases:
        lease.settle()
    assert {status for _, _, status in counts(here.store).values()} == {"ok", "recovered"}


def test_a_moved_file_is_the_same_store(tmp_path, opened):
    """A renamed, linked or restored database file is the same store and finds its processes' leftovers."""
    root, file = tmp_path / "state", tmp_path / "a.db"
    first = opened(f"sqlite:///{file}", root).state_dir
    (tmp_path / "link.db").symlink_to(file)
    assert opened(f"sqlite:///{tmp_path}/link.db", root).state_dir == first
    copy(f"sqlite:///{file}", f"sqlite:///{tmp_path}/backup")
    moved = tmp_path / "b.db"
    for end in ("", "-wal", "-shm"):
        if (part := Path(f"{file}{end}")).exists():
            part.rename(f"{moved}{end}")
    assert opened(f"sqlite:///{moved}", root).state_dir == first
    for end in ("", "-wal", "-shm"):
        Path(f"{moved}{end}").unlink(missing_ok=True)
    shutil.copy(tmp_path / "backup", moved)
    restored = opened(f"sqlite:///{moved}", root)
    assert restored.state_dir != first, "the backup is of when the file had another name"
    shutil.copy(tmp_path / "backup", file)
    assert opened(f"sqlite:///{file}", root).state_dir == first


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_one_database_by_two_urls_is_one_store(store_url, tmp_path, opened, reserve_of):
    """Two URLs of one database, with another host name and options, are one store with one state directory."""
    root = tmp_path / "state"
    one = opened(store_url, root)
    another = store_url.replace("127.0.0.1", "localhost") + "?application_name=other&connect_timeout=5"
    half_done(one, reserve_of, "one")
    two = opened(another, root)
    assert two.state_dir == one.state_dir
    two.maintain()
    assert counts(two.store) == exact("one")


def test_two_state_directories_of_one_store(store_url, tmp_path, opened, reserve_of):
    """Two servers of one database that keep their state apart, as two hosts do, and share an engine: each engine's
    counts come once, from a journal in either directory."""
    ledgers = [opened(store_url, tmp_path / name) for name in ("a", "b")]
    engine = MeteredRequests("generation")
    for number, ledger in enumerate(ledgers):
        ledger.reserve(reserve_of(f"r{number}")).settle(completion=4 + number)
        engine.begin(f"client{number}", request_of(f"r{number}"), str(ledger.journal_dir))
        engine.count([(f"client{number}", f"r{number}", Tokens(0, tuple(range(4 + number))))])
    names = {path.name for ledger in ledgers for path in ledger.journal_dir.iterdir()}
    assert len(names) == 2
    engine.close()
    for ledger in (*ledgers, *ledgers):
        ledger.maintain()
    assert counts(ledgers[0].store) == {"r0": (4, 4, "ok"), "r1": (5, 5, "ok")}


def test_what_an_earlier_release_left_is_taken_over(store_url, other_url, tmp_path, opened, reserve_of):
    """Files of an earlier release, without a store's name, go only to the store that knows their requests."""
    root = tmp_path / "state"
    dead = opened(store_url, root)
    half_done(dead, reserve_of, "old")
    for part in ("owners", "engines"):
        (dead.state_dir / part).rename(root / part)
    stranger = opened(other_url, root)
    stranger.maintain()
    assert len(list((root / "owners").iterdir())) == 1
    heir = opened(store_url, root)
    heir.maintain()
    assert counts(heir.store) == exact("old")
    assert [*(root / "owners").iterdir(), *(root / "engines").iterdir()] == []


def test_the_migration_gives_an_existing_store_its_identity(store_url):
    """A database of the release before has one after it was opened, and keeps it."""
    store = Store(store_url)
    store.write(lambda connection: _back_to_0003(connection))
    store.close()
    again = Store(store_url)
    found = ensure_identity(again)
    again.close()
    later = Store(store_url)
    assert ensure_identity(later) == found
    later.close()


def _back_to_0003(connection: sa.Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(metering.__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    command.downgrade(config, "0003")
