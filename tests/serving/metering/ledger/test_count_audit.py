"""Received ≤ billed ≤ generated: checked at each settlement, and corrected, counted and logged where it is broken."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from ledger_rows import die, rows_of, write_old_counts

from mlflow_llm.serving.metering import Ledger, Limits, Usage, UsageFilter
from mlflow_llm.serving.metering.accounts.limits import check_integrity
from mlflow_llm.serving.metering.ledger import count_audit
from mlflow_llm.serving.system.journal import Journal


@pytest.fixture
def broken(ledger):
    """Return the number of violations that the ledger has counted, by rule."""
    found = Counter()
    ledger.audit.on_violation = lambda rule: found.update([rule])
    return found


def counts(store):
    """Return (billed, generated) of each row."""
    rows = Usage(store).rows(UsageFilter())
    return {row.request_id: (row.completion_tokens, row.generated_tokens) for row in rows}


def journalled(ledger, name, **tokens):
    """Write the journal of an engine that has ended after generating ``tokens`` for each request."""
    journal = Journal(ledger.journal_dir, name)
    for request_id, count in tokens.items():
        journal.count(journal.begin(request_id), count)
    journal.close()


def after_a_minute(ledger, clock):
    clock.now += count_audit.AUDIT_SECONDS + 1
    ledger.maintain()


def test_fewer_billed_than_were_sent_are_billed_as_sent(ledger, store, reserve_of, broken, caplog):
    """A settlement with fewer tokens than were sent on bills those that were sent."""
    lease = ledger.reserve(reserve_of("r1"))
    lease.count(5)
    lease.settle(completion=3)
    assert rows_of(store)["r1"].completion_tokens == 5
    assert broken == {"billed_below_received": 1}
    assert "request r1: 5 tokens were sent, 3 were to be billed" in caplog.text


def test_a_short_count_is_raised_to_what_was_received(ledger, store, clock, reserve_of, broken, caplog):
    """A minute after its settlement a row with too small a count of its engine is corrected, once; exact rows and those
    that are still open are not touched.
    """
    for name in ("short", "exact", "more", "open"):
        lease = ledger.reserve(reserve_of(name))
        lease.count(5)
        if name != "open":
            lease.settle()
    journalled(ledger, "engine-1", short=2, exact=5, more=7)
    ledger.maintain()
    assert counts(store)["short"] == (5, 2)
    with caplog.at_level(logging.ERROR):
        after_a_minute(ledger, clock)
        after_a_minute(ledger, clock)
    assert counts(store) == {"short": (5, 5), "exact": (5, 5), "more": (5, 7), "open": (5, 0)}
    assert broken == {"generated_below_billed": 1}
    assert caplog.text.count("request short: 5 tokens are billed, 2 were counted by its engines") == 1


def test_counts_that_arrive_late_replace_what_was_assumed(ledger, store, clock, reserve_of, broken):
    """A journal that is read after the correction, in any number of parts, gives the exact sum and no more."""
    ledger.reserve(reserve_of("r1")).settle(completion=5)
    after_a_minute(ledger, clock)
    assert counts(store) == {"r1": (5, 5)}
    assert broken == {"generated_unknown": 1}  # the host of its engine may be away
    for name, tokens, expected in (("a", 2, 5), ("b", 4, 6), ("c", 1, 7)):
        journalled(ledger, name, r1=tokens)
        ledger.maintain()
        assert counts(store) == {"r1": (5, expected)}


def test_rows_of_a_process_that_ended_are_looked_at_by_those_that_began_before_it(
    ledger, store, tmp_path, clock, reserve_of, broken
):
    """A row whose process ends within the minute is corrected by a process that runs all along."""
    ledger.maintain()
    ended = Ledger(store, state_dir=tmp_path / "state", clock=clock, monotonic=clock)
    ended.reserve(reserve_of("r1")).settle(completion=5)
    ended.close()
    clock.now += count_audit.LOOK_AGAIN_SECONDS
    ledger.maintain()
    after_a_minute(ledger, clock)
    assert counts(store) == {"r1": (5, 5)}
    assert broken == {"generated_unknown": 1}


def test_embeddings_generate_nothing(ledger, store, clock, reserve_of, broken):
    """Rows of pooled tasks have no count of an engine and need none."""
    ledger.reserve(reserve_of("r1", task="embeddings", max_output_tokens=0)).settle()
    after_a_minute(ledger, clock)
    assert counts(store) == {"r1": (0, 0)}


def test_a_host_that_is_back_corrects_what_was_recovered_without_it(store, tmp_path, clock, reserve_of):
    """Rows that others settled by a checkpoint get the counts of the host's progress file once it is back, whatever
    came in between, and windows equal the rows.
    """
    Limits(store).set("tenant", "acme", "otpm", 1000)
    here, there = (Ledger(store, state_dir=tmp_path / name, clock=clock, monotonic=clock) for name in ("a", "b"))
    lease = there.reserve(reserve_of("r1"))
    lease.count(3)
    there.maintain()
    lease.count(4)
    die(there)
    clock.now += 1
    here.recover()
    clock.now += 61
    assert here.recover() == 1
    row = rows_of(store)["r1"]
    assert (row.completion_tokens, row.status) == (3, "recovered")
    ended = row.ended_ms
    clock.now += 1000
    back = Ledger(store, state_dir=tmp_path / "b", clock=clock, monotonic=clock)
    assert back.recover() == 1
    row = rows_of(store)["r1"]
    assert (row.prompt_tokens, row.completion_tokens, row.status, row.ended_ms) == (10, 7, "recovered", ended)
    assert back.recover() == 0
    check_integrity(store)
    for ledger in (here, back):
        ledger.close()


def test_smaller_counts_that_arrive_late_change_nothing(store, tmp_path, clock, reserve_of):
    """Old pages of a progress file after a power cut do not lower a recovered row."""
    here, there = (Ledger(store, state_dir=tmp_path / name, clock=clock, monotonic=clock) for name in ("a", "b"))
    lease = there.reserve(reserve_of("r1"))
    lease.count(6)
    there.maintain()
    write_old_counts(there, lease, completion=2)
    die(there)
    here.recover()
    clock.now += 61
    assert here.recover() == 1
    back = Ledger(store, state_dir=tmp_path / "b", clock=clock, monotonic=clock)
    assert back.recover() == 0
    assert rows_of(store)["r1"].completion_tokens == 6
    check_integrity(store)
    for ledger in (here, back):
        ledger.close()
