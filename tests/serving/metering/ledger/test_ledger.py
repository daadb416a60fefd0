from __future__ import annotations

import contextlib

import pytest

from mlflow_llm.serving.interface.errors import Aborted, AlreadyExists, InvalidField, LimitExceeded, RequestError
from mlflow_llm.serving.metering import Bucket, Limits, Price, Usage, UsageFilter
from mlflow_llm.serving.metering.accounts.limits import check_integrity


def rows_of(store):
    return {row.request_id: row for row in Usage(store).rows(UsageFilter())}


def test_a_settled_row_has_the_tokens_and_their_price(store, ledger, reserve_of, clock):
    """Cost is the exact sum over prompt, cached and output tokens, rounded half up once."""
    ledger.prices.set("model-1", Price(input=3_000_000, cached=300_000, output=15_000_000))
    with ledger.reserve(reserve_of("r1", adapter="poet")) as lease:
        lease.count(3, prompt=10, cached=4)
        lease.count(2)
        clock.now += 2
        lease.settle(finish_reason="stop")
    row = rows_of(store)["r1"]
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (10, 4, 5)
    assert row.cost == 6 * 3 + 1 + 5 * 15  # 4 × 0.3 = 1.2, rounded with the rest
    assert (row.status, row.finish_reason, row.adapter) == ("ok", "stop", "poet")
    assert row.ended_ms - row.started_ms == 2000


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "ok"),
        (ValueError, "error"),
        (GeneratorExit, "aborted"),
        (Aborted, "aborted"),
        (BrokenPipeError, "aborted"),
    ],
)
def test_leaving_the_context_settles_whatever_happened(store, ledger, reserve_of, error, status):
    """Success, an error and a disconnect all close the row with what was counted."""
    expected = pytest.raises(error) if error is not None else contextlib.nullcontext()
    with expected, ledger.reserve(reserve_of("r1")) as lease:
        lease.count(7)
        if error is not None:
            raise error("gone")
    row = rows_of(store)["r1"]
    assert (row.status, row.prompt_tokens, row.completion_tokens) == (status, 10, 7)


def test_a_request_that_never_ran_is_billed_nothing(store, ledger, reserve_of):
    """An error before the first count leaves prompt 0; a success without counts (embeddings) bills its prompt."""
    with pytest.raises(ValueError, match="early"), ledger.reserve(reserve_of("r1")):
        raise ValueError("early")
    with ledger.reserve(reserve_of("r2", task="embeddings", max_output_tokens=0)):
        pass
    rows = rows_of(store)
    assert (rows["r1"].prompt_tokens, rows["r2"].prompt_tokens) == (0, 10)


def test_drafts_are_written_down_and_cost_nothing(store, ledger, reserve_of):
    """Tokens that were drafted, and those of them that were taken, stand beside what is billed."""
    ledger.prices.set("*", Price(input=1_000_000, output=2_000_000))
    for name, drafts in (("plain", (0, 0)), ("drafted", (9, 4))):
        ledger.reserve(reserve_of(name)).settle(prompt=10, completion=5, drafts=drafts)
    rows = {row.request_id: row for row in Usage(store).rows(UsageFilter())}
    found = rows["drafted"]
    assert (found.draft_tokens, found.accepted_draft_tokens, found.completion_tokens) == (9, 4, 5)
    assert found.cost == rows["plain"].cost > 0


def test_settling_twice_changes_nothing(store, ledger, reserve_of):
    """The first settlement is the only one."""
    Limits(store).set("key", "key_1", "otpm", 100)
    lease = ledger.reserve(reserve_of("r1"))
    lease.settle(prompt=10, completion=5)
    lease.settle(prompt=99, completion=99)
    lease.count(50)
    assert rows_of(store)["r1"].completion_tokens == 5
    check_integrity(store)


def test_a_request_id_is_admitted_once(ledger, reserve_of):
    """A second reservation under the same id is refused."""
    ledger.reserve(reserve_of("r1")).settle()
    with pytest.raises(AlreadyExists):
        ledger.reserve(reserve_of("r1"))


@pytest.mark.parametrize("changes", [{"request_id": ""}, {"request_id": "x" * 257}, {"input_tokens": -1}])
def test_a_reservation_is_checked(ledger, reserve_of, changes):
    """Ids and counts out of range are refused by name."""
    with pytest.raises(InvalidField):
        ledger.reserve(reserve_of(**({"request_id": "r1"} | changes)))


def test_output_is_reserved_and_the_unused_part_credited(store, ledger, reserve_of):
    """max tokens count until the end of the request, then only what was generated does."""
    Limits(store).set("tenant", "acme", "otpm", 50)
    first = ledger.reserve(reserve_of("r1", max_output_tokens=40))
    assert [(s.kind, s.allowed, s.remaining) for s in first.limits] == [("otpm", 50, 10)]
    with pytest.raises(LimitExceeded) as refused:
        ledger.reserve(reserve_of("r2", max_output_tokens=20))
    assert (refused.value.limit, refused.value.allowed, refused.value.remaining) == ("otpm", 50, 10)
    assert refused.value.retry_after == 61
    first.settle(completion=5)
    ledger.reserve(reserve_of("r3", max_output_tokens=45)).settle(completion=45)
    assert "r2" not in rows_of(store)
    check_integrity(store)


def test_retry_after_is_when_it_fits(store, ledger, reserve_of, clock):
    """One second before it the request is still refused, at it it is admitted."""
    Limits(store).set("key", "key_1", "itpm", 30)
    for number in range(3):
        ledger.reserve(reserve_of(f"r{number}")).settle()
        clock.now += 10
    with pytest.raises(LimitExceeded) as refused:
        ledger.reserve(reserve_of("late", input_tokens=15))
    wait = refused.value.retry_after
    assert wait == 61 - 20  # two of the three must leave
    clock.now += wait - 1
    with pytest.raises(LimitExceeded):
        ledger.reserve(reserve_of("late", input_tokens=15))
    clock.now += 1
    ledger.reserve(reserve_of("late", input_tokens=15)).settle()


def test_a_request_that_can_never_fit_says_so(store, ledger, reserve_of):
    """More than the whole limit is no matter of time: clients retry what is."""
    Limits(store).set("key", "key_1", "otpm", 19)
    with pytest.raises(RequestError, match="more than the limit ever allows") as refused:
        ledger.reserve(reserve_of("r1"))
    assert (refused.value.status, refused.value.param) == (400, "max_tokens")


def test_the_strictest_level_wins(store, ledger, reserve_of):
    """Key, tenant and endpoint are all checked, and the longest wait is the one that is reported."""
    limits = Limits(store)
    limits.set("key", "key_1", "qph", 10)
    limits.set("tenant", "acme", "qph", 2)
    limits.set("endpoint", "chat", "in_flight", 2)
    first, second = ledger.reserve(reserve_of("r1")), ledger.reserve(reserve_of("r2"))
    with pytest.raises(LimitExceeded) as refused:
        ledger.reserve(reserve_of("r3"))
    assert refused.value.limit == "qph"
    assert refused.value.allowed == 2
    with pytest.raises(LimitExceeded) as refused:
        ledger.reserve(reserve_of("r4", tenant="other", key_id="key_2"))
    assert (refused.value.limit, refused.value.retry_after) == ("in_flight", 1)
    first.settle()
    second.settle()
    ledger.reserve(reserve_of("r5", tenant="other", key_id="key_2")).settle()
    check_integrity(store)


def test_users_of_an_endpoint_are_limited_each_by_itself(store, ledger, reserve_of):
    """A limit of scope user is set on the endpoint and counts for each key alone."""
    Limits(store).set("user", "chat", "qpm", 1)
    ledger.reserve(reserve_of("r1")).settle()
    ledger.reserve(reserve_of("r2", key_id="key_2")).settle()
    ledger.reserve(reserve_of("r3", endpoint="other")).settle()
    with pytest.raises(LimitExceeded):
        ledger.reserve(reserve_of("r4", key_id="key_2"))


def test_a_limit_counts_what_came_before_it(store, ledger, reserve_of):
    """A window is built from the ledger, so that a limit set now holds for the minute that has passed."""
    open_lease = ledger.reserve(reserve_of("r1", max_output_tokens=30))
    ledger.reserve(reserve_of("r2")).settle(completion=7)
    Limits(store).set("tenant", "acme", "otpm", 50)
    with pytest.raises(LimitExceeded) as refused:
        ledger.reserve(reserve_of("r3"))
    assert refused.value.remaining == 50 - 30 - 7
    open_lease.settle(completion=0)
    ledger.reserve(reserve_of("r3")).settle()
    check_integrity(store)


def test_removing_the_last_limit_removes_its_window(store, ledger, reserve_of):
    """A limit set again later is right again."""
    limits = Limits(store)
    limits.set("key", "key_1", "otpm", 25)
    ledger.reserve(reserve_of("r1")).settle(completion=20)
    assert limits.remove("key", "key_1", "otpm")
    assert not limits.remove("key", "key_1", "otpm")
    ledger.reserve(reserve_of("r2")).settle(completion=3)
    limits.set("key", "key_1", "otpm", 25)
    with pytest.raises(LimitExceeded) as refused:
        ledger.reserve(reserve_of("r3"))
    assert refused.value.remaining == 2


def test_a_budget_is_never_overspent(store, ledger, reserve_of, clock):
    """Money is reserved like tokens, by the price at admission; the day's budget is back the next day."""
    ledger.prices.set("model-1", Price(input=1_000_000, output=2_000_000))
    limits = Limits(store)
    limits.set("tenant", "acme", "budget_day", 100)
    limits.set("tenant", "acme", "budget", 1000)
    ledger.reserve(reserve_of("r1")).settle(completion=20)  # 10 + 40
    ledger.reserve(reserve_of("r2")).settle(completion=5)  # 10 + 10
    with pytest.raises(LimitExceeded) as refused:
        ledger.reserve(reserve_of("r3"))
    assert (refused.value.limit, refused.value.remaining) == ("budget_day", 30)
    assert clock.now + refused.value.retry_after == (clock.now // 86400 + 1) * 86400
    clock.now += refused.value.retry_after
    lease = ledger.reserve(reserve_of("r3"))
    assert {s.kind: s.remaining for s in lease.limits} == {"budget_day": 50, "budget": 880}
    lease.settle(completion=20)
    check_integrity(store)


def test_a_price_holds_from_its_time(store, ledger, reserve_of, clock):
    """A request pays what held when it was admitted, whenever it ends."""
    ledger.prices.set("*", Price(output=1_000_000))
    ledger.prices.set("*", Price(output=5_000_000), effective=clock.now + 10)
    first = ledger.reserve(reserve_of("r1"))
    clock.now += 10
    ledger.reserve(reserve_of("r2")).settle(completion=2)
    first.settle(completion=2)
    assert {name: row.cost for name, row in rows_of(store).items()} == {"r1": 2, "r2": 10}


def test_the_reserve_is_a_bucket(store, ledger, reserve_of, clock):
    """Tokens within rate × time + burst are within the reserve, no more; unused ones come back."""
    bucket = Bucket(rate=10, burst_seconds=6, prompt_weight_milli=500)  # 60 tokens; a request takes 20 + 5

    def admit(name):
        return ledger.reserve(reserve_of(name, bucket=bucket))

    leases = [admit(f"r{number}") for number in range(3)]
    assert [lease.within_reserve for lease in leases] == [True, True, False]
    leases[0].settle(completion=10)  # 10 tokens back
    leases[2].settle(completion=20)  # took nothing, gives nothing back
    clock.now += 1
    assert admit("r4").within_reserve  # 10 left + 10 back + 10 refilled, 25 taken
    assert not admit("r5").within_reserve
