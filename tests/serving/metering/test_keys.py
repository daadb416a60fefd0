from __future__ import annotations

import hashlib

import pytest
import sqlalchemy as sa

from mlflow_llm.serving.errors import InvalidField, NotFound, PermissionDenied, Unauthenticated
from mlflow_llm.serving.metering import Keys, keys, tables


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
    """At once where it was revoked, elsewhere when the cache entry has aged."""
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


def test_what_makes_no_key_is_refused(store):
    """Bad tenants, names, scopes and unknown keys are named."""
    ours = Keys(store)
    for arguments in ({"tenant": ""}, {"tenant": "a", "scopes": ()}, {"tenant": "a", "scopes": ("root",)}):
        with pytest.raises(InvalidField):
            ours.create(**arguments)
    with pytest.raises(NotFound):
        ours.revoke("key_none")
