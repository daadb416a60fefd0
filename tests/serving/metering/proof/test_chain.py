"""The hash chain of the ledger: linked after settlements, and what its check finds."""

from __future__ import annotations

import json
import threading

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from ledger_rows import bury

from mlflow_llm.serving.cli import cli
from mlflow_llm.serving.metering import Ledger, Store
from mlflow_llm.serving.metering.ledger.retention import fold
from mlflow_llm.serving.metering.ledger.settlement import Settlement, settle_in
from mlflow_llm.serving.metering.ledger.window_repair import repair
from mlflow_llm.serving.metering.proof import chain
from mlflow_llm.serving.metering.proof.chain import extend
from mlflow_llm.serving.metering.proof.chain_check import check, head
from mlflow_llm.serving.metering.store.tables import ledger as ledger_table
from mlflow_llm.serving.metering.store.tables import links


def settle(ledger, reserve_of, *names):
    for name in names:
        ledger.reserve(reserve_of(name)).settle(completion=3, finish_reason="stop")


@pytest.fixture
def linked(ledger, reserve_of):
    """Return a ledger with six settled requests in a chain of three batches."""
    for names in (("a1", "a2", "a3"), ("b1",), ("c1", "c2")):
        settle(ledger, reserve_of, *names)
        ledger.maintain()
    return ledger


def change(store, statement):
    store.write(lambda connection: connection.execute(statement))


def told(store, kept=None):
    """Return what a check finds, as pairs of request or link and problem."""
    report = check(store, kept)
    assert report.num_problems == len(report.problems)
    return [(one.request_id or one.link, one.problem) for one in report.problems]


def test_upkeep_links_settled_rows_in_signed_batches(store, linked, reserve_of):
    """Each settled row has one link, the last link of a batch is signed, and an open row has none."""
    lease = linked.reserve(reserve_of("open"))
    linked.maintain()
    report = check(store)
    assert (report.links, report.rows, report.waiting, report.num_problems) == (6, 6, 0, 0)
    signed = sa.select(links.c.sequence).where(links.c.signature.is_not(None)).order_by(links.c.sequence)
    assert store.read(lambda connection: connection.execute(signed).scalars().all()) == [3, 4, 6]
    assert report.head == head(store)
    lease.settle()
    assert check(store).waiting == 1
    linked.maintain()
    assert check(store).rows == 7


@pytest.mark.parametrize(
    ("change_to", "problem"),
    [
        ({"completion_tokens": 1}, "the row was altered"),
        ({"cost": 7}, "the row was altered"),
        ({"tags": {"team": "other"}}, "the row was altered"),
        ({"tenant": "other", "chained": None}, "the row was altered, or settled again"),
        ({"request_id": "d9"}, "the row was removed"),
    ],
)
def test_an_altered_row_is_named(store, linked, change_to, problem):
    """A row whose values, mark or id were changed past the ledger is named by the check."""
    change(store, sa.update(ledger_table).where(ledger_table.c.request_id == "b1").values(change_to))
    assert ("b1", problem) in told(store)


def test_a_row_that_was_changed_and_linked_again_is_named(store, linked):
    """Removing the mark of an altered row does not help: its new link says that it had ended already."""
    altered = sa.update(ledger_table).where(ledger_table.c.request_id == "b1").values(cost=9, chained=None)
    change(store, altered)
    linked.maintain()
    assert told(store) == [("b1", "changed after it was settled: links 4 and 7")]


def test_removed_rows_and_links_are_named(store, linked):
    """A removed row, a removed link in the middle and links cut off at the end are named one by one."""
    change(store, sa.delete(ledger_table).where(ledger_table.c.request_id == "a2"))
    change(store, sa.delete(links).where(links.c.sequence.in_([4, 6])))
    assert told(store) == [
        ("a2", "the row was removed"),
        (5, "link 4 was removed"),
        (5, "the chain ends without a signature: links at its end were removed"),
        ("c2", "its link 6 was removed from the end of the chain"),
    ]


def test_altered_links_are_named(store, linked):
    """A link with another hash of its row, and a signature of somebody else's, are named."""
    change(store, sa.update(links).where(links.c.sequence == 2).values(row_hash="0" * 64))
    change(store, sa.update(links).where(links.c.sequence == 3).values(signature="AAAA"))
    assert told(store) == [
        ("a2", "the link was altered"),
        ("a2", "the row was altered"),
        (3, "its signature is not that of this store's key"),
    ]


def test_a_doubled_row_is_named(store, linked):
    """A copy of a row under another id is named, with the link of the original and with one of its own."""

    def copy(connection):
        row = connection.execute(sa.select(ledger_table).where(ledger_table.c.request_id == "b1")).mappings().one()
        connection.execute(sa.insert(ledger_table).values({**row, "request_id": "b1-again"}))

    store.write(copy)
    assert told(store) == [
        ("b1-again", "the row was added: its link is another row's"),
        (None, "the row was doubled: b1, b1-again"),
    ]
    change(store, sa.update(ledger_table).where(ledger_table.c.request_id == "b1-again").values(chained=None))
    linked.maintain()
    assert told(store) == [(None, "the row was doubled: b1, b1-again")]


def test_a_kept_head_finds_a_chain_that_was_cut_or_made_anew(store, linked, reserve_of):
    """With a head that was kept, rows removed together with the newest links are found, and so is a new chain."""
    kept = head(store)
    assert told(store, kept) == []
    change(store, sa.delete(ledger_table).where(ledger_table.c.request_id.in_(["c1", "c2"])))
    change(store, sa.delete(links).where(links.c.sequence >= 5))
    assert told(store) == []
    assert told(store, kept) == [(None, "the kept head, link 6, is not in the chain: it was removed")]
    settle(linked, reserve_of, "d1", "d2")
    linked.maintain()
    assert told(store, kept) == [(None, "the kept head, link 6, is not in the chain: another is there")]


def test_a_recovered_row_is_linked_again_by_right(store, ledger, reserve_of):
    """A row that was settled by its checkpoint, and exactly when its host came back, has two links and no problem."""
    ledger.reserve(reserve_of("r1")).count(4)
    counts = {"prompt": 10, "cached": 0, "finish_reason": "abort", "ended_ms": ledger.now_ms()}
    settle_in(store, Settlement(request_id="r1", completion=4, status="recovered", **counts))
    ledger.maintain()
    settle_in(store, Settlement(request_id="r1", completion=5, status="ok", **counts))
    assert told(store) == []
    ledger.maintain()
    report = check(store)
    assert (report.links, report.rows, report.amended, report.num_problems) == (2, 1, 1, 0)


def test_counts_of_engines_that_come_later_change_no_hash(store, linked):
    """``generated_tokens`` are not in a row's hash: journals and the audit write them after the settlement."""
    change(store, sa.update(ledger_table).values(generated_tokens=99, assumed_tokens=5))
    assert told(store) == []


def test_folded_days_stay_verifiable(store, ledger, reserve_of, clock):
    """Folding links what has no link, keeps the links of its rows, and a link that is said to be folded is found."""
    settle(ledger, reserve_of, "old1", "old2")
    clock.now += 40 * 86_400
    settle(ledger, reserve_of, "new")
    assert fold(store, 32, clock=clock) == 2
    report = check(store)
    assert (report.links, report.rows, report.folded, report.num_problems) == (4, 1, 2, 0)
    change(store, sa.delete(ledger_table).where(ledger_table.c.request_id == "new"))
    fold_link = store.read(lambda c: c.execute(sa.select(links.c.sequence).where(links.c.kind == "folded")).scalar())
    change(store, sa.update(links).where(links.c.request_id == "new").values(folded_by=fold_link))
    told_now = told(store)
    assert [where for where, _ in told_now] == [fold_link]
    assert told_now[0][1].startswith("the rows that were folded are not those of its links")


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
def test_repaired_times_are_linked_again(store, linked, clock):
    """Rows whose times ``windows repair`` moved have links that say so, and no problem."""
    clock.now -= 86_400
    assert repair(store, wall=clock).rows == 6
    report = check(store)
    assert (report.rows, report.amended, report.num_problems) == (6, 6, 0)


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
def test_upkeep_links_several_batches(store, ledger, reserve_of, monkeypatch):
    """A round of upkeep links all that was settled, also where it is more than a batch."""
    monkeypatch.setattr(chain, "BATCH_ROWS", 3)
    settle(ledger, reserve_of, *(f"r{number}" for number in range(8)))
    ledger.maintain()
    signed = sa.select(links.c.sequence).where(links.c.signature.is_not(None)).order_by(links.c.sequence)
    assert store.read(lambda connection: connection.execute(signed).scalars().all()) == [3, 6, 8]
    assert check(store).rows == 8


def test_many_holders_make_one_chain(store, store_url, ledger, reserve_of):
    """Several processes that link at once, beside settlements, make one chain in which each row has one link."""
    stores = [Store(store_url) for _ in range(3)]
    done = threading.Event()

    def link(one):
        while not done.is_set():
            extend(one, ledger.now_ms(), rows=2)

    threads = [threading.Thread(target=link, args=(one,)) for one in stores]
    for thread in threads:
        thread.start()
    try:
        settle(ledger, reserve_of, *(f"r{number}" for number in range(40)))
    finally:
        done.set()
        for thread in threads:
            thread.join()
        for one in stores:
            one.close()
    while extend(store, ledger.now_ms(), wait=True):
        pass
    report = check(store)
    assert (report.links, report.rows, report.num_problems) == (40, 40, 0)


def test_a_batch_that_is_killed_in_the_middle_leaves_nothing(store, ledger, reserve_of, monkeypatch):
    """A holder that ends between the links and the rows' marks has changed nothing; the next one links all."""
    settle(ledger, reserve_of, "r1", "r2")

    def killed(*_given, **_named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(chain, "update_rows", killed)
        with pytest.raises(KeyboardInterrupt):
            extend(store, ledger.now_ms())
    assert check(store).links == 0
    assert extend(store, ledger.now_ms()) == 2
    assert extend(store, ledger.now_ms()) == 0
    assert (check(store).rows, told(store)) == (2, [])


def test_offline_settlement_links_too(store, store_url, ledger, reserve_of, tmp_path, clock):
    """``usage settle`` links what it settles, without a server."""
    ledger.reserve(reserve_of("r1")).count(2)
    bury(ledger)
    environment = {"MLFLOW_LLM_STATE": str(tmp_path / "other")}
    restarted = Ledger(store, state_dir=tmp_path / "state", clock=clock, monotonic=clock)
    restarted.recover()
    settled = CliRunner().invoke(cli, ["usage", "settle", "--database", store_url], env=environment)
    assert settled.exit_code == 0, settled.output
    assert (check(store).rows, check(store).waiting) == (1, 0)
    restarted.close()


def test_the_command_names_problems_and_fails(store, store_url, linked, tmp_path):
    """``ledger head`` and ``ledger verify`` work on the same database; a problem is printed, and the exit code is 1."""
    run = CliRunner().invoke
    kept = tmp_path / "head.json"
    kept.write_text(run(cli, ["ledger", "head", "--database", store_url]).stdout)
    well = run(cli, ["ledger", "verify", "--database", store_url, "--head", str(kept)])
    assert (well.exit_code, well.stdout) == (
        0,
        "6 links, 6 rows as they were settled, 0 of folded days, 0 amended, 0 waiting for their links\n",
    )
    change(store, sa.update(ledger_table).where(ledger_table.c.request_id == "c1").values(cost=1))
    found = run(cli, ["ledger", "verify", "--database", store_url])
    assert found.exit_code == 1
    assert "link 5, request c1: the row was altered\n" in found.stdout
    report = json.loads(run(cli, ["ledger", "verify", "--database", store_url, "--json"]).stdout)
    assert report["problems"] == [{"link": 5, "request_id": "c1", "problem": "the row was altered"}]
    kept.write_text("{}")
    refused = run(cli, ["ledger", "verify", "--database", store_url, "--head", str(kept)])
    assert refused.exit_code == 2
    assert "is not a head of a ledger" in refused.stderr
