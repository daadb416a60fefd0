"""The callers that share prompt prefixes in the cache."""

from __future__ import annotations

import itertools
import multiprocessing

import pytest

from mlflow_llm.flavors.llm.predict import session
from mlflow_llm.serving.tasks.cache_salt import CacheSalts

SALTS = CacheSalts(b"s" * 32)


def salt(sharing: str = "tenant", tenant: str = "a", endpoint: str = "e", asked: str | None = None) -> str | None:
    return SALTS.salt(sharing, tenant=tenant, endpoint=endpoint, asked=asked)


def test_tenants_have_salts_of_their_own() -> None:
    """A tenant's requests have one salt at all endpoints, and another tenant's have another."""
    assert salt(endpoint="e") == salt(endpoint="f")
    assert salt(tenant="a") != salt(tenant="b")


def test_an_endpoint_may_share_among_all() -> None:
    """With "endpoint" all callers of the endpoint have one salt, those of another endpoint another."""
    assert salt("endpoint", tenant="a") == salt("endpoint", tenant="b")
    assert salt("endpoint", endpoint="e") != salt("endpoint", endpoint="f")


def test_off_shares_with_nobody() -> None:
    """With "off" there is no salt, whatever the request says."""
    assert salt("off") is None
    assert salt("off", asked="mine") is None


def test_a_request_s_own_salt_parts_further() -> None:
    """``cache_salt`` parts requests of one tenant and never joins two tenants."""
    found = [salt(tenant=tenant, asked=asked) for tenant in "ab" for asked in (None, "x", "y")]
    assert len(set(found)) == 6


def test_no_two_scopes_meet() -> None:
    """A tenant named as an endpoint, or with a part of its name in the salt, still has a salt of its own."""
    words = ("a", "b", "ab", "tenant", "endpoint")
    scopes = list(itertools.product(("tenant", "endpoint"), words, (None, *words)))
    assert len({salt(kind, tenant=word, endpoint=word, asked=asked) for kind, word, asked in scopes}) == len(scopes)


def test_servers_have_secrets_of_their_own() -> None:
    """Two servers share no prefix; two workers with one secret do."""
    asked = {"tenant": "a", "endpoint": "e", "asked": None}
    assert CacheSalts().salt("tenant", **asked) != CacheSalts().salt("tenant", **asked)
    assert CacheSalts(b"s" * 32).salt("tenant", **asked) == salt()


def test_a_process_and_its_workers_have_one_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of one process, also by multiprocessing, share a secret, and no other process does."""
    first = session.process_secret()
    assert session.process_secret() == first
    monkeypatch.setattr(multiprocessing.current_process(), "authkey", b"another process's")
    assert session.process_secret() != first
