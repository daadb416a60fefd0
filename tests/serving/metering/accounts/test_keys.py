from __future__ import annotations

import hashlib

import pytest
import sqlalchemy as sa

from mlflow_llm.serving.interface.errors import Conflict, InvalidField, NotFound, PermissionDenied, Unauthenticated
from mlflow_llm.serving.metering import Keys
from mlflow_llm.serving.metering.accounts import keys
from mlflow_llm.serving.metering.store import tables
from mlflow_llm.serving.metering.store.time_formats import format_utc


def test_a_secret_is_shown_once_and_stored_as_a_hash(store):
    """The store holds SHA-256 of the secret and its first characters, nothing else of it."""
    secret, key = Keys(store).create("acme", name="ci", scopes=("invoke", "usage"))
    assert secret.startswith("sk-")
    assert len(secret) == 46  # 256 bits in base64
    row = store.read(lambda connection: connection.execute(sa.select(tables.api_keys)).one())
    assert row.hash == hashlib.sha256(secret.encode()).hexdigest()
    assert all(secret not in str(value) for value in row)
    assert Keys(store).list("acme") == (key,)
    assert Keys(store).list("other") == ()


def test_a_key_is_verified_with_its_scopes(store):
    """The caller has the key's tenant; a scope it lacks is a 403, anything else a 401."""
    ours = Keys(store)
    secret, key = ours.create("acme")
    caller = ours.verify(secret)
    assert (caller.key_id, caller.tenant, caller.scopes) == (key.key_id, "acme", ("invoke",))
    with pytest.raises(PermissionDenied):
        ours.verify(secret, scope="manage")
    for wrong in (None, "", "Bearer", "sk-", secret + "x", "sk-" + "é" * 20, "sk-\udcff", "sk-" + "x" * 4096):
        with pytest.raises(Unauthenticated):
            ours.verify(wrong)


def test_a_revoked_key_is_refused_by_every_process_within_the_caches_time(store, monkeypatch):
    """A revoked key is refused at once by the process that revoked it, and by others when their cache entry has
    expired.
    """
    here, elsewhere = Keys(store), Keys(store)
    secret, key = here.create("acme")
    here.verify(secret)
    elsewhere.verify(secret)
    first = here.revoke(key.prefix)
    assert here.revoke(key.key_id) == first
    with pytest.raises(Unauthenticated):
        here.verify(secret)
    monkeypatch.setattr(keys, "CACHE_SECONDS", 0.0)
    with pytest.raises(Unauthenticated):
        elsewhere.verify(secret)


def test_invalid_key_fields_are_refused(store):
    """Bad tenants, names, scopes and unknown keys are named."""
    ours = Keys(store)
    for arguments in ({"tenant": ""}, {"tenant": "a", "scopes": ()}, {"tenant": "a", "scopes": ("root",)}):
        with pytest.raises(InvalidField):
            ours.create(**arguments)
    with pytest.raises(NotFound):
        ours.revoke("key_none")


@pytest.mark.parametrize("late", ["9999-12-31T23:59:59-23:59", "253402300800000", "9007199254740991"])
def test_a_key_expires_within_the_calendar(store, late):
    """An expiry beyond the last date is refused; the last date itself can be shown."""
    with pytest.raises(InvalidField, match=r"^expires: "):
        Keys(store).create("acme", expires=late)
    _, key = Keys(store).create("acme", expires="9999-12-31T23:59:59")
    assert format_utc(key.expires_ms) == "9999-12-31 23:59:59"


def test_a_key_expires(store, clock):
    """A key expires at its time even if it is cached; an expiry in the past is refused."""
    ours = Keys(store, clock=clock)
    secret, key = ours.create("acme", expires="1h")
    assert key.expires_ms == clock() * 1000 + 3_600_000
    ours.verify(secret)
    clock.now += 3600
    with pytest.raises(Unauthenticated, match="has expired"):
        ours.verify(secret)
    assert ours.get(key.key_id).state(int(clock() * 1000)) == "expired"
    ours.update(key.key_id, expires="never")
    assert ours.verify(secret).key_id == key.key_id
    for past in ("2020-01-01", "0", "soon", "-1d", "1y"):
        with pytest.raises(InvalidField, match=r"^expires: "):
            ours.create("acme", expires=past)


def test_a_rotated_key_has_two_secrets_for_a_while(store, clock):
    """The id stays, and with it limits and usage; a second rotation shortens the first one's overlap, none lengthens
    it; without an overlap the old secret ends at once."""
    ours = Keys(store, clock=clock)
    first, key = ours.create("acme")
    second, rotated = ours.rotate(key.key_id, overlap="1h")
    assert (rotated.key_id, rotated.overlap_ms) == (key.key_id, clock() * 1000 + 3_600_000)
    assert ours.verify(first) == ours.verify(second)
    third, _ = ours.rotate(key.key_id, overlap="10m")
    clock.now += 600
    for ended in (first, second):
        with pytest.raises(Unauthenticated):
            ours.verify(ended)
    assert ours.verify(third).key_id == key.key_id
    fourth, now = ours.rotate(key.key_id, overlap="0")
    assert now.overlap_ms is None
    with pytest.raises(Unauthenticated):
        ours.verify(third)
    ours.revoke(key.key_id)
    with pytest.raises(Unauthenticated):
        ours.verify(fourth)
    with pytest.raises(Conflict):
        ours.rotate(key.key_id)


def test_revoking_ends_the_old_secret_too(store, clock):
    """Revoking a rotated key ends its old secret too."""
    ours = Keys(store, clock=clock)
    first, key = ours.create("acme")
    ours.rotate(key.key_id)
    ours.revoke(key.key_id)
    with pytest.raises(Unauthenticated):
        ours.verify(first)


def test_an_expired_key_is_rotated_with_a_new_end_only(store, clock):
    """Rotating an expired key needs a new expiry, and its old secret stays expired."""
    ours = Keys(store, clock=clock)
    first, key = ours.create("acme", expires="1h")
    clock.now += 3600
    with pytest.raises(Conflict, match="expires"):
        ours.rotate(key.key_id)
    second, _ = ours.rotate(key.key_id, expires="1h")
    ours.verify(second)
    with pytest.raises(Unauthenticated):
        ours.verify(first)


def test_what_a_key_may_use(store):
    """A key may use an endpoint with all its adapters or one adapter alone; without a list it may use all."""
    ours = Keys(store)
    secret, key = ours.create("acme", endpoints=("chat", "law:legal"))
    caller = ours.verify(secret)
    assert [caller.may_use("chat", adapter) for adapter in (None, "any")] == [True, True]
    assert [caller.may_use("law", adapter) for adapter in (None, "legal", "tax")] == [False, True, False]
    assert [caller.may_see(name) for name in ("chat", "law", "other")] == [True, True, False]
    ours.update(key.key_id, endpoints=("*",))
    assert ours.verify(secret).may_use("other", None)
    for wrong in ((), ("",), ("a b",), ("chat:",), tuple(f"e{n}" for n in range(101))):
        with pytest.raises(InvalidField, match=r"^endpoints: "):
            ours.create("acme", endpoints=wrong)
