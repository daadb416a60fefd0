"""Limits on each end user that a trusted caller names: counted apart, exactly, in a bounded number of windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from mlflow_llm.serving.interface.errors import InvalidField, LimitExceeded, PermissionDenied
from mlflow_llm.serving.interface.labels import Labels
from mlflow_llm.serving.metering import Ledger, Limits, Price, Store
from mlflow_llm.serving.metering.accounts.limits import check_integrity
from mlflow_llm.serving.metering.ledger import admission
from mlflow_llm.serving.metering.store.tables import windows
from mlflow_llm.serving.metering.usage.filter import UsageFilter
from mlflow_llm.serving.metering.usage.usage import Usage

Reserve = Callable[..., Any]
HOUR = 3661


def used_by(store: Store) -> list[tuple[str, str]]:
    """Return the windows of end users."""
    query = sa.select(windows.c.scope, windows.c.subject).where(windows.c.used_at.is_not(None))
    return sorted(tuple(row) for row in store.read(lambda connection: connection.execute(query).all()))


@pytest.mark.parametrize(
    ("scope", "subject"), [("tenant_user", "acme"), ("key_user", "key_1"), ("endpoint_user", "chat")]
)
def test_each_end_user_is_counted_apart(
    store: Store, ledger: Ledger, reserve_of: Reserve, scope: str, subject: str
) -> None:
    """One user's requests leave the other's limit alone; a request that names nobody counts for nobody."""
    Limits(store).set(scope, subject, "qpm", 2)
    for number in range(2):
        lease = ledger.reserve(reserve_of(f"ada-{number}", limited_user="ada"))
    assert [(left.scope, left.allowed, left.remaining) for left in lease.limits] == [(scope, 2, 0)]
    with pytest.raises(LimitExceeded, match=r"qpm: the limit of each end user of the \w+ is 2 queries a minute; 0 are"):
        ledger.reserve(reserve_of("ada-2", limited_user="ada"))
    ledger.reserve(reserve_of("bo-0", limited_user="bo"))
    for number in range(3):
        ledger.reserve(reserve_of(f"nobody-{number}", labels=Labels(user="ada")))  # a label alone is no limit's matter
    assert len(used_by(store)) == 2
    check_integrity(store)


def test_an_own_limit_replaces_that_of_each(store: Store, ledger: Ledger, reserve_of: Reserve) -> None:
    """A named end user has its own limit of that kind, higher or lower, and the others of each end user."""
    limits = Limits(store)
    limits.set("tenant_user", "acme", "qpm", 1)
    limits.set("tenant_user", "acme", "itpm", 30)
    limits.set("tenant_user", "acme", "qpm", 5, end_user="ada")
    limits.set("tenant_user", "acme", "qpm", 0, end_user="eve")
    for number in range(3):
        ledger.reserve(reserve_of(f"ada-{number}", limited_user="ada"))
    with pytest.raises(LimitExceeded, match="itpm: the limit of each end user of the tenant is 30"):
        ledger.reserve(reserve_of("ada-3", limited_user="ada"))
    with pytest.raises(PermissionDenied, match="qpm: the limit of this end user of the tenant is 0"):
        ledger.reserve(reserve_of("eve-0", limited_user="eve"))
    ledger.reserve(reserve_of("bo-0", limited_user="bo"))
    with pytest.raises(LimitExceeded, match="qpm: the limit of each end user"):
        ledger.reserve(reserve_of("bo-1", limited_user="bo"))
    assert [(one.subject, one.end_user, one.value) for one in limits.list("tenant_user", "acme")] == [
        ("acme", "", 30), ("acme", "", 1), ("acme", "ada", 5), ("acme", "eve", 0)
    ]  # fmt: skip


def test_end_users_of_two_tenants_are_two(store: Store, ledger: Ledger, reserve_of: Reserve) -> None:
    """At an endpoint that two tenants use, one's "ada" takes nothing from the other's."""
    Limits(store).set("endpoint_user", "chat", "qpm", 1)
    ledger.reserve(reserve_of("r1", limited_user="ada"))
    ledger.reserve(reserve_of("r2", limited_user="ada", tenant="other", key_id="key_2"))
    with pytest.raises(LimitExceeded):
        ledger.reserve(reserve_of("r3", limited_user="ada"))
    check_integrity(store)


def test_the_unused_part_is_credited(store: Store, ledger: Ledger, reserve_of: Reserve) -> None:
    """A settlement gives an end user back what its request did not use."""
    Limits(store).set("tenant_user", "acme", "otpm", 30)
    Limits(store).set("tenant_user", "acme", "in_flight", 1)
    lease = ledger.reserve(reserve_of("r1", limited_user="ada"))
    with pytest.raises(LimitExceeded):
        ledger.reserve(reserve_of("r2", limited_user="ada"))
    lease.settle(completion=5)
    (left,) = [one for one in ledger.reserve(reserve_of("r3", limited_user="ada")).limits if one.kind == "otpm"]
    assert left.remaining == 5
    check_integrity(store)


def test_limits_are_exact_over_two_gateways(
    store: Store, store_url: str, ledger: Ledger, reserve_of: Reserve, tmp_path: Path, clock: Callable[[], float]
) -> None:
    """Each end user gets exactly as many requests as its limit says, of many at once through two gateways."""
    Limits(store).set("tenant_user", "acme", "qpm", 3)
    Limits(store).set("tenant_user", "acme", "qpm", 5, end_user="cy")
    second = Store(store_url)
    other = Ledger(second, state_dir=tmp_path / "other", clock=clock, monotonic=clock)

    def attempt(number: int) -> str | None:
        user, gateway = ("ada", "bo", "cy")[number % 3], (ledger, other)[number // 3 % 2]
        try:
            gateway.reserve(reserve_of(f"r{number}", limited_user=user)).settle(completion=1)
        except LimitExceeded:
            return None
        return user

    try:
        with ThreadPoolExecutor(6) as threads:
            admitted = Counter(threads.map(attempt, range(36)))
        del admitted[None]
        assert admitted == {"ada": 3, "bo": 3, "cy": 5}
        check_integrity(store)
    finally:
        other.close()
        second.close()


def test_windows_that_are_pruned_come_back_exactly(
    store: Store, ledger: Ledger, reserve_of: Reserve, clock: Any
) -> None:
    """An hour after its last use a window is gone from the store, and a budget still counts what was used before."""
    ledger.prices.set("model-1", Price(input=1_000_000, output=1_000_000))
    Limits(store).set("tenant_user", "acme", "budget_month", 50)
    Limits(store).set("key", "key_1", "qpm", 100)
    ledger.maintain()
    ledger.reserve(reserve_of("r1", limited_user="ada")).settle(completion=20)
    running = ledger.reserve(reserve_of("r2", limited_user="bo"))
    clock.now += HOUR
    ledger.maintain()
    assert used_by(store) == []
    running.settle(completion=20)
    for user in ("ada", "bo"):
        with pytest.raises(LimitExceeded, match=r"0\.00002 are left"):
            ledger.reserve(reserve_of("r3", limited_user=user))
    assert len(used_by(store)) == 2
    check_integrity(store)


def test_the_number_of_windows_is_bounded(
    store: Store, ledger: Ledger, reserve_of: Reserve, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever makes up names of end users fills no database: the windows used longest ago are removed."""
    monkeypatch.setattr(admission, "MAX_END_USER_WINDOWS", 2)
    monkeypatch.setattr(admission, "PRUNE_ROWS", 2)  # so that one round takes two transactions
    Limits(store).set("tenant_user", "acme", "qph", 1)
    for number in range(5):
        clock.now += 1
        ledger.reserve(reserve_of(f"r{number}", limited_user=f"user-{number}"))
    clock.now += 60
    ledger.maintain()
    assert used_by(store) == [("tenant_user", "acme\nuser-3"), ("tenant_user", "acme\nuser-4")]
    with pytest.raises(LimitExceeded):
        ledger.reserve(reserve_of("again", limited_user="user-0"))


def test_removing_the_last_limit_removes_the_windows(store: Store, ledger: Ledger, reserve_of: Reserve) -> None:
    """The windows of end users stay as long as one limit of their scope and subject is there."""
    limits = Limits(store)
    limits.set("tenant_user", "acme", "qpm", 9)
    limits.set("tenant_user", "acme", "qpm", 10, end_user="ada")
    ledger.reserve(reserve_of("r1", limited_user="ada"))
    assert limits.remove("tenant_user", "acme", "qpm")
    assert len(used_by(store)) == 1
    assert not limits.remove("tenant_user", "acme", "qpm")
    assert limits.remove("tenant_user", "acme", "qpm", end_user="ada")
    assert used_by(store) == []


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (("tenant_user", "acme", "budget", 1, ""), "kind"),  # folded days know no end users
        (("tenant", "acme", "qpm", 1, "ada"), "end_user"),
        (("tenant_user", "acme", "qpm", 1, "a" * 257), "end_user"),
        (("tenant_user", "a" * 129, "qpm", 1, ""), "subject"),
        (("tenant_user", "acme\nada", "qpm", 1, ""), "subject"),
    ],
)
def test_a_limit_that_cannot_be_counted_is_refused(store: Store, given: tuple[Any, ...], name: str) -> None:
    """The error names the field."""
    *limit, end_user = given
    with pytest.raises(InvalidField) as refused:
        Limits(store).set(*limit, end_user=end_user)
    assert refused.value.param == name


def test_a_row_keeps_the_label_and_the_limited_user_apart(store: Store, ledger: Ledger, reserve_of: Reserve) -> None:
    """Usage shows what callers said, whether or not limits count by it."""
    ledger.reserve(reserve_of("r1", labels=Labels(user="ada"))).settle()
    ledger.reserve(reserve_of("r2", labels=Labels(user="ada"), limited_user="ada")).settle()
    assert [row.end_user for row in Usage(store).rows(UsageFilter())] == ["ada", "ada"]
