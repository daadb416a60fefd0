from __future__ import annotations

import contextlib
import re
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from mlflow_llm.serving.interface.errors import InvalidField, Unavailable, without_password
from mlflow_llm.serving.metering import Limits, Store
from mlflow_llm.serving.metering.accounts.money import Price, cost
from mlflow_llm.serving.metering.store import checks, tables
from mlflow_llm.serving.metering.store.checks import NoStore


def test_migrations_give_the_tables_that_the_code_uses(store):
    """The migrated schema equals the metadata of the code."""
    with store.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []


@pytest.mark.parametrize("older", checks.revisions()[:-1])
def test_every_older_database_is_upgraded(older: str, store_url: str) -> None:
    """A database of any earlier revision has the tables that the code uses once it was opened."""
    config = Config()
    config.set_main_option("script_location", str(checks.MIGRATIONS).replace("%", "%%"))
    engine = sa.create_engine(store_url)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, older)
    engine.dispose()
    store = Store(store_url)
    with store.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []
    store.close()


def test_many_processes_open_a_new_database_at_once(store_url):
    """If many processes open a new database, one migrates it and the others wait."""
    script = f"from mlflow_llm.serving.metering import Store; Store({store_url!r}).close()"
    openers = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) for _ in range(4)]
    errors = [opener.communicate(timeout=240)[1].decode() for opener in openers]
    assert [opener.returncode for opener in openers] == [0] * 4, errors


def test_writes_of_many_threads_come_one_after_another(store):
    """Concurrent read-then-write transactions lose no update."""
    limits = Limits(store)
    limits.set("key", "k", "qph", 0)
    table = tables.limits

    def add(connection: sa.Connection) -> None:
        value = connection.execute(sa.select(table.c.value).with_for_update()).scalar_one()
        connection.execute(sa.update(table).values(value=value + 1))

    def many() -> None:
        for _ in range(25):
            store.write(add, timeout=240)

    threads = [threading.Thread(target=many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert limits.list()[0].value == 200


def other_program(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        connection.execute("INSERT INTO alembic_version VALUES ('0123456789ab')")
        connection.commit()


def other_program_without_migrations(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
        connection.commit()


def later_version(path: Path) -> None:
    Store(f"sqlite:///{path}").close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999_of_tomorrow'")
        connection.commit()


def never(seconds):
    raise AssertionError(f"a pause of {seconds} seconds before what another attempt will not mend")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (Path.mkdir, "unable to open database file"),
        (lambda path: path.write_text("no database" * 1000), "file is not a database"),
        (other_program, "is another program's database"),
        (other_program_without_migrations, "is another program's database"),
        (later_version, "was made by a later version of mlflow-llm"),
    ],
)
def test_files_that_are_not_stores_are_refused(made, reason, tmp_path, monkeypatch):
    """A file that is not a store is refused at once with the URL and the reason, and left unchanged."""
    file = tmp_path / "x.db"
    made(file)
    before = file.is_file() and file.read_bytes()
    url = f"sqlite:///{tmp_path}/x.db"
    monkeypatch.setattr(time, "sleep", never)
    with pytest.raises(NoStore, match=f"^database {re.escape(url)}: {reason}"):
        Store(url)
    assert (file.is_file() and file.read_bytes()) == before


def test_revisions_are_alembics():
    """The revisions read from the migrations' file names are alembic's, in the same order."""
    config = Config()
    config.set_main_option("script_location", str(checks.MIGRATIONS))
    scripts = ScriptDirectory.from_config(config).walk_revisions()
    assert checks.revisions() == [script.revision for script in scripts][::-1]


def test_a_new_file_is_for_its_owner_alone(tmp_path):
    """A new database file, with key hashes and the ledger, is private, and SQLite's other files have its mode."""
    file = tmp_path / "x.db"
    store = Store(f"sqlite:///{file}")
    store.read(lambda connection: connection.execute(sa.text("SELECT 1")).all())
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    store.close()
    assert len(modes) == 3
    assert set(modes.values()) == {0o600}


def test_a_database_that_others_hold_is_waited_for(tmp_path):
    """A locked database is waited for; only after the timeout the error says that it does not answer, and why."""
    url = f"sqlite:///{tmp_path}/x.db"
    Store(url).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "x.db")) as other:
        other.execute("UPDATE alembic_version SET version_num = '0001'")
        other.commit()
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Unavailable, match="does not answer: database is locked"):
            Store(url, timeout=0.05)


def test_postgresql_that_is_not_there(monkeypatch):
    """A refused connection is final, and the password is not shown; a patient opener goes on."""
    pytest.importorskip("psycopg", reason="the extra 'postgres' is not installed")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"postgresql://me:s3cret@127.0.0.1:{port}/db"
    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", never)
        with pytest.raises(NoStore, match=r"postgresql://me:\*\*\*@127.*refused") as refused:
            Store(url)
    assert "s3cret" not in str(refused.value)
    with pytest.raises(Unavailable, match="refused"):
        Store(url, timeout=0.05, patient=True)


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("postgresql://me:a:b/c@d@host/db", "postgresql://me:***@host/db"),
        (
            "postgresql://host/db?user=me&password=x&sslmode=require",
            "postgresql://host/db?user=me&password=***&sslmode=require",
        ),
        ("me:secret@host", "me:***@host"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("sqlite:////a:b/c@d.db", "sqlite:////a:b/c@d.db"),
    ],
)
def test_passwords_are_not_shown(url, seen):
    """Passwords are removed from a URL's address and query."""
    assert without_password(url) == seen


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:///x.db?synchronous=maybe", "synchronous"),
        ("sqlite:///x.db?synchronus=FULL", "synchronus: no such parameter; expected synchronous"),
        ("mysql://me:s3cret@host/db", "is neither"),
        ("nodialect://x", "is neither"),
        ("store.db", "is not a URL"),
        ("postgresql://host:port/db", "is not a URL"),
    ],
)
def test_urls_that_cannot_work_are_refused(url, reason):
    """A database in memory is no store for several workers; what is not a URL is not taken for a file."""
    with pytest.raises(NoStore, match=reason) as refused:
        Store(url)
    assert "s3cret" not in str(refused.value)


def test_a_store_is_made_only_where_it_may_be(store_url, tmp_path):
    """A store is created only by commands that may create one, and its directory never is."""
    with pytest.raises(NoStore, match="make one"):
        Store(store_url, make=False)
    Store(store_url).close()
    Store(store_url, make=False).close()
    with pytest.raises(NoStore, match=f"there is no directory {tmp_path}/no$"):
        Store(f"sqlite:///{tmp_path}/no/x.db")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "limit", [("model", "x", "itpm", 1), ("key", "", "itpm", 1), ("key", "x", "tpm", 1), ("key", "x", "itpm", -1)]
)
def test_limits_are_checked(store, limit):
    """Scope, subject, kind and value out of range are refused by name."""
    with pytest.raises(InvalidField):
        Limits(store).set(*limit)


def test_money_rounds_half_up_once():
    """0.5 micro-units round up; parts are not rounded before they are summed."""
    price = Price(input=500_000, cached=250_000, output=250_000)
    assert cost(price, prompt=1, cached=0, completion=0) == 1
    assert cost(price, prompt=1, cached=1, completion=0) == 0
    assert cost(price, prompt=1, cached=1, completion=1) == 1
    with pytest.raises(ValueError, match="cached"):
        Price(input=1, cached=2)
