"""The audit log, and the migration that brings it."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.exc import DBAPIError

from mlflow_llm.serving.errors import InvalidField
from mlflow_llm.serving.metering import Actor, Audit, AuditFilter, Keys, Limits, Price, Prices, Store, migrations
from mlflow_llm.serving.metering.money import set_currency

ANN = Actor(name="key_ann", via="http", tenant="acme", request_id="r1")
ALL = AuditFilter()


def test_every_change_is_told_once(store):
    """Who, when, what, before and after, newest first; a change that was none, or failed, leaves nothing."""
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
    """A cursor leads on to the oldest entry; entries are found by actor, action and target."""
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
    """The database refuses it, whoever asks."""
    Limits(store).set("tenant", "acme", "qph", 1)
    for statement in ("UPDATE audit SET actor = 'x'", "DELETE FROM audit"):
        with pytest.raises(DBAPIError, match="append-only"), store.engine.begin() as connection:
            connection.execute(sa.text(statement))
    assert len(Audit(store).page(ALL)[0]) == 1


def at_revision(url: str, revision: str) -> None:
    """A database as an earlier version of the package made it."""
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
    """Keys of before neither expire nor are for some endpoints only, and can be changed as others."""
    at_revision(store_url, "0002")
    store = Store(store_url)
    keys = Keys(store)
    (key,) = keys.list()
    assert (key.key_id, key.scopes, key.expires_ms, key.endpoints) == ("key_1", ("invoke", "usage"), None, None)
    secret, _ = keys.rotate("key_1")
    assert keys.verify(secret).tenant == "acme"
    assert [entry.action for entry in Audit(store).page(ALL)[0]] == ["key.rotate"]
    store.close()
