"""The audit log, and the migration that brings it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from click.testing import CliRunner
from sqlalchemy.exc import DBAPIError

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.metering import Actor, Audit, AuditFilter, Keys, Limits, Price, Prices, Store, migrations
from mlflow_llm.serving.metering.accounts import audit
from mlflow_llm.serving.metering.accounts.audit import DAY_MS, prune, record
from mlflow_llm.serving.metering.accounts.money import set_currency
from mlflow_llm.serving.metering.store import tables

ANN = Actor(name="key_ann", via="http", tenant="acme", request_id="r1")
ALL = AuditFilter()


def test_every_change_is_reported_once(store):
    """Each change has one entry with actor, time, action and both states, newest first; failed or empty changes have
    none.
    """
    keys, limits, prices = Keys(store), Limits(store), Prices(store)
    secret, key = keys.create("acme", limits=[("qph", 5)], by=ANN)
    keys.rotate(key.key_id, by=ANN)
    keys.revoke(key.key_id, by=ANN)
    keys.revoke(key.key_id, by=ANN)
    limits.set("tenant", "acme", "budget", 2_500_000, by=ANN)
    limits.set("tenant", "acme", "budget", 3_000_000)
    limits.remove("tenant", "acme", "budget", by=ANN)
    limits.remove("tenant", "acme", "budget", by=ANN)
    prices.set("*", Price(input=3_000_000), by=ANN)
    prices.remove("*", by=ANN)
    set_currency(store, "EUR", by=ANN)
    with pytest.raises(InvalidField):
        keys.create("acme", limits=[("speed", 1)], by=ANN)
    entries, cursor = Audit(store).page(ALL)
    assert cursor is None
    assert [entry.action for entry in entries] == [
        "currency.set",
        "price.delete",
        "price.set",
        "limit.delete",
        "limit.set",
        "limit.set",
        "key.revoke",
        "key.rotate",
        "limit.set",
        "key.create",
    ]
    assert (entries[0].after, entries[2].after["input"]) == ("EUR", "3.00")
    assert (entries[4].before, entries[4].after, entries[4].via) == ({"budget": "2.50"}, {"budget": "3.00"}, "python")
    first = entries[-1]
    assert (first.actor, first.tenant, first.via, first.request_id) == ("key_ann", "acme", "http", "r1")
    assert (first.target, first.before, first.after["tenant"]) == (key.key_id, None, "acme")
    assert secret not in str(entries)
    assert len(keys.list()) == 1


def test_pages_of_the_log(store):
    """A cursor leads to the oldest entry, and entries are filtered by actor, action and target."""
    limits = Limits(store)
    for number in range(5):
        limits.set("tenant", f"t{number}", "qph", 1, by=ANN if number % 2 else None)
    log = Audit(store)
    first, cursor = log.page(ALL, limit=3)
    rest, end = log.page(ALL, limit=3, cursor=cursor)
    assert [entry.target for entry in (*first, *rest)] == [f"tenant t{number}" for number in (4, 3, 2, 1, 0)]
    assert end is None
    assert len(log.page(AuditFilter(actor="key_ann"))[0]) == 2
    assert len(log.page(AuditFilter(target="tenant t0", action="limit.set"))[0]) == 1
    assert log.page(AuditFilter(start_ms=first[0].at_ms + 1))[0] == ()
    for wrong in ("x", "-1", "9" * 30, str(2**63)):
        with pytest.raises(InvalidField, match=r"^cursor: "):
            log.page(ALL, cursor=wrong)


def test_the_log_cannot_be_rewritten(store):
    """The database itself refuses to change or delete audit entries."""
    Limits(store).set("tenant", "acme", "qph", 1)
    for statement in ("UPDATE audit SET actor = 'x'", "DELETE FROM audit"):
        with pytest.raises(DBAPIError, match="append-only"), store.engine.begin() as connection:
            connection.execute(sa.text(statement))
    assert len(Audit(store).page(ALL)[0]) == 1


def aged(store: Store, *days: float) -> None:
    """Make audit entries as many days old as given."""
    now = int(time.time() * 1000)
    with store.engine.begin() as connection:
        for number, age in enumerate(days):
            row = {"at_ms": now - int(age * DAY_MS), "actor": "old", "via": "python", "action": "limit.set"}
            connection.execute(sa.insert(tables.audit).values(**row, target=f"tenant t{number}"))


def test_old_entries_are_pruned(store, monkeypatch):
    """Old entries are pruned by age in batches; a pruning that removed entries is itself recorded."""
    monkeypatch.setattr(audit, "BATCH_ROWS", 2)
    aged(store, 500, 101, 100.1, 99.9, 1, 200, 300)
    assert prune(store, 100, by=ANN) == 5
    entry, *kept = Audit(store).page(ALL)[0]
    assert [one.target for one in kept] == ["tenant t4", "tenant t3"]
    assert (entry.action, entry.actor, entry.target, entry.after["entries"]) == (
        "audit.prune",
        "key_ann",
        "100",
        5,
    )
    assert prune(store, 100) == 0
    assert len(Audit(store).page(ALL)[0]) == 3
    for days in (89, 0, -1, True, "100", 10**6):
        with pytest.raises(InvalidField, match=r"^days: "):
            prune(store, days)


def test_what_no_entry_allows_is_kept(store):
    """The database keeps entries younger than the recorded age, the record itself, and all if that age is too short."""
    aged(store, 100, 300, 400)
    assert prune(store, 350) == 1
    statement = sa.text("DELETE FROM audit WHERE action = 'audit.prune' OR target = 'tenant t1'")
    for _ in range(2):
        with pytest.raises(DBAPIError, match="append-only"), store.engine.begin() as connection:
            connection.execute(statement)
        with store.engine.begin() as connection:
            record(connection, None, "audit.prune", "0")  # a forged one
    assert len(Audit(store).page(ALL)[0]) == 5
    assert prune(store, 90) == 2


def test_the_command(store, store_url):
    """``audit prune`` takes --database on either side of its name, like ``usage fold``, and no server."""
    aged(store, 100)
    for words in (["audit", "--database", store_url, "prune", "90"], ["audit", "prune", "--database", store_url, "90"]):
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, done.output
        assert done.stdout == ("removed 1 entries\n" if words[1] == "--database" else "removed 0 entries\n")
    shown = CliRunner().invoke(cli, ["audit", "--database", store_url]).stdout
    assert "audit.prune" in shown
    alone = CliRunner(env={"MLFLOW_LLM_DATABASE": None}).invoke(cli, ["audit", "--url", "http://x", "prune", "90"])
    assert "Missing option '--database'" in alone.stderr


def at_revision(url: str, revision: str) -> None:
    """Return a database as an earlier version of the package made it."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        connection.execute(sa.text("INSERT INTO tenants VALUES ('acme', 1)"))
        columns = "key_id, hash, prefix, tenant, name, scopes, created_ms"
        values = "'key_1', 'aa', 'sk-a', 'acme', 'ci', 'invoke usage', 1"
        connection.execute(sa.text(f"INSERT INTO api_keys ({columns}) VALUES ({values})"))
    engine.dispose()


def test_an_older_database_is_upgraded(store_url):
    """After an upgrade older keys have no expiry and no endpoint list, and can be changed like others."""
    at_revision(store_url, "0002")
    store = Store(store_url)
    keys = Keys(store)
    (key,) = keys.list()
    assert (key.key_id, key.scopes, key.expires_ms, key.endpoints) == ("key_1", ("invoke", "usage"), None, None)
    secret, _ = keys.rotate("key_1")
    assert keys.verify(secret).tenant == "acme"
    assert [entry.action for entry in Audit(store).page(ALL)[0]] == ["key.rotate"]
    store.close()
