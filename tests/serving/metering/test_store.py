from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from mlflow_llm.serving.errors import InvalidField, Unavailable
from mlflow_llm.serving.metering import Limits, Store, tables
from mlflow_llm.serving.metering.money import Price, cost


def test_migrations_give_the_tables_that_the_code_uses(store):
    """Nothing differs between the migrated schema and the metadata."""
    with store.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []


def test_many_processes_open_a_new_database_at_once(store_url):
    """One migrates, the others wait for it."""
    script = f"from mlflow_llm.serving.metering import Store; Store({store_url!r}).close()"
    openers = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) for _ in range(6)]
    errors = [opener.communicate(timeout=120)[1].decode() for opener in openers]
    assert [opener.returncode for opener in openers] == [0] * 6, errors


def test_writes_of_many_threads_come_one_after_another(store):
    """Read-then-write transactions lose no update."""
    limits = Limits(store)
    limits.set("key", "k", "qph", 0)
    table = tables.limits

    def add(connection: sa.Connection) -> None:
        value = connection.execute(sa.select(table.c.value).with_for_update()).scalar_one()
        connection.execute(sa.update(table).values(value=value + 1))

    def many() -> None:
        for _ in range(25):
            store.write(add, timeout=30)

    threads = [threading.Thread(target=many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert limits.list()[0].value == 200


def test_a_database_that_cannot_be_opened_is_unavailable(tmp_path):
    """A clear error within the timeout, not a stack of SQL errors."""
    (tmp_path / "x.db").mkdir()
    with pytest.raises(Unavailable):
        Store(str(tmp_path / "x.db"), timeout=0.05)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite:///x.db?synchronous=maybe"])
def test_urls_that_cannot_work_are_refused(url):
    """A database in memory is no store for several workers."""
    with pytest.raises(ValueError, match=r"memory|synchronous"):
        Store(url)


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
