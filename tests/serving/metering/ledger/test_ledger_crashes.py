from __future__ import annotations

import errno
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
from ledger_rows import die, forget, owner_of, rows_of, spool_settlements, undo_admission, write_old_counts
from postgres_databases import new_database

from mlflow_llm.serving.interface.errors import Unavailable
from mlflow_llm.serving.metering import Ledger, Limits, Store
from mlflow_llm.serving.metering.accounts.limits import check_integrity
from mlflow_llm.serving.metering.ledger.ledger import LedgerStatus
from mlflow_llm.serving.metering.ledger.spool import spooled

WORKER = Path(__file__).parents[1] / "ledger_worker.py"


@pytest.fixture
def successor(store, tmp_path, clock):
    """Return another process's ledger over the same store and state."""
    opened = Ledger(store, state_dir=tmp_path / "state", clock=clock, monotonic=clock)
    yield opened
    opened.close()


def test_a_dead_processs_rows_are_settled_by_what_it_counted(store, tmp_path, clock, reserve_of, successor):
    """Open rows of a process that ended are closed with the tokens counted until then, and credited."""
    Limits(store).set("tenant", "acme", "in_flight", 3)
    dead = Ledger(store, state_dir=tmp_path / "state", clock=clock, monotonic=clock)
    ran, waiting = dead.reserve(reserve_of("ran")), dead.reserve(reserve_of("waiting"))
    ran.count(5)
    alive = successor.reserve(reserve_of("alive"))
    assert successor.recover() == 0  # both live
    die(dead)
    assert successor.recover() == 2
    assert successor.recover() == 0
    rows = rows_of(store)
    assert (rows["ran"].prompt_tokens, rows["ran"].completion_tokens, rows["ran"].status) == (10, 5, "recovered")
    assert (rows["waiting"].prompt_tokens, rows["waiting"].status) == (0, "recovered")
    assert rows["alive"].status == "open"
    alive.settle()
    assert not waiting.settled
    check_integrity(store)


def test_another_hosts_rows_wait_for_its_heartbeat(store, tmp_path, clock, reserve_of, successor):
    """Without the owner's directory a row is settled by its checkpoint once no heartbeat was seen for a minute."""
    elsewhere = Ledger(store, state_dir=tmp_path / "other-host", clock=clock, monotonic=clock)
    lease = elsewhere.reserve(reserve_of("r1"))
    lease.count(4)
    elsewhere.maintain()
    lease.count(3)
    assert successor.recover() == 0
    clock.now += 59
    elsewhere.maintain()
    assert successor.recover() == 0
    lease.count(2)
    clock.now += 59
    assert successor.recover() == 0
    clock.now += 2
    assert successor.recover() == 1
    assert rows_of(store)["r1"].completion_tokens == 7
    lease.settle(finish_reason="stop")  # the host was only cut off: its own numbers are exact
    row = rows_of(store)["r1"]
    assert (row.completion_tokens, row.status) == (9, "ok")
    lease.settle()
    elsewhere.close()
    check_integrity(store)


def test_a_checkpoint_newer_than_the_progress_file_counts(store, tmp_path, clock, reserve_of, successor):
    """A power cut may leave old pages of the progress file: counts only grow, so the larger are the right ones."""
    dead = Ledger(store, state_dir=tmp_path / "state", clock=clock, monotonic=clock)
    lease = dead.reserve(reserve_of("r1"))
    lease.count(6)
    dead.maintain()
    write_old_counts(dead, lease, completion=2)
    die(dead)
    assert successor.recover() == 1
    assert rows_of(store)["r1"].completion_tokens == 6


@pytest.fixture
def locked(sqlite_url):
    """Return a connection that can lock the whole database."""
    connection = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    yield connection
    connection.close()


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
def test_with_the_store_away_nothing_is_admitted_and_nothing_lost(store, ledger, reserve_of, locked):
    """Admission fails closed, settlements wait in the spool and are written once when the store is back."""
    Limits(store).set("key", "key_1", "otpm", 100)
    leases = [ledger.reserve(reserve_of(f"r{number}")) for number in range(3)]
    locked.execute("BEGIN EXCLUSIVE")
    for lease in leases:
        with lease:
            lease.count(2)
    with pytest.raises(Unavailable) as refused:
        ledger.reserve(reserve_of("refused"))
    assert refused.value.retry_after == 1
    with pytest.raises(Unavailable):
        ledger.maintain()
    assert owner_of(ledger).spool.pending
    locked.execute("ROLLBACK")
    ledger.maintain()
    assert not owner_of(ledger).spool.pending
    rows = rows_of(store)
    assert {name: (row.completion_tokens, row.status) for name, row in rows.items()} == {
        f"r{number}": (2, "ok") for number in range(3)
    }
    check_integrity(store)


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
def test_a_ledger_says_how_it_stands(store, ledger, reserve_of, locked):
    """A ledger reports open rows, the spool's size and whether the store answers; an outage is logged once."""
    outages = []
    ledger.on_outage = lambda: outages.append(1)
    leases = [ledger.reserve(reserve_of(f"r{number}")) for number in range(3)]
    ledger.maintain()
    assert ledger.status() == LedgerStatus(open_rows=3, spooled=0, answers=True)
    locked.execute("BEGIN EXCLUSIVE")
    for lease in leases[:2]:
        lease.settle()
    for _ in range(2):
        with pytest.raises(Unavailable):
            ledger.maintain()
    assert ledger.status() == LedgerStatus(open_rows=3, spooled=2, answers=False)
    locked.execute("ROLLBACK")
    ledger.maintain()
    assert ledger.status() == LedgerStatus(open_rows=1, spooled=0, answers=True)
    assert outages == [1]


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
def test_a_spool_outlives_its_process(store, tmp_path, clock, reserve_of, locked, successor):
    """The exact settlement in a dead process's spool comes before what its progress file says."""
    dead = Ledger(store, state_dir=tmp_path / "state", clock=clock, monotonic=clock)
    lease = dead.reserve(reserve_of("r1"))
    locked.execute("BEGIN EXCLUSIVE")
    lease.settle(completion=9, finish_reason="length")
    locked.execute("ROLLBACK")
    (spool,) = spooled(owner_of(dead).directory)
    with spool.open("ab") as torn:
        torn.write(b'{"request_id": "r1", "prom')
    die(dead)
    assert successor.recover() == 1
    row = rows_of(store)["r1"]
    assert (row.completion_tokens, row.finish_reason, row.status) == (9, "length", "ok")
    assert not owner_of(dead).directory.exists()


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
def test_with_store_and_disk_full_a_settlement_waits_in_memory(
    store, ledger, reserve_of, locked, monkeypatch, tmp_path
):
    """Neither the store nor the spool takes it: it is kept and written later."""
    lease = ledger.reserve(reserve_of("r1"))
    locked.execute("BEGIN EXCLUSIVE")

    def full(_settlement):
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(owner_of(ledger).spool, "append", full)
        lease.settle(completion=3)
    locked.execute("ROLLBACK")
    assert rows_of(store)["r1"].status == "open"
    ledger.maintain()
    assert rows_of(store)["r1"].completion_tokens == 3


def test_with_the_disk_full_a_store_that_answers_is_asked(store, ledger, reserve_of, monkeypatch, caplog):
    """No request is admitted whose progress has no room, none holds a reservation, and what could not be spooled is
    settled by the store; the log has a line, not one for each."""
    Limits(store).set("tenant", "acme", "in_flight", 3)
    lease = ledger.reserve(reserve_of("r1"))

    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(owner_of(ledger).spool, "append", full)
        patched.setattr(owner_of(ledger).progress, "free", [])
        patched.setattr(os, "posix_fallocate", full)
        for number in range(5):
            with pytest.raises(Unavailable, match="no room"):
                ledger.reserve(reserve_of(f"refused-{number}"))
        spool_settlements(ledger)
        lease.settle(completion=3)
        undo_admission(ledger, "r1", "another")
        assert set(rows_of(store)) == {"r1"}
        assert ledger.status().spooled == 2
        spool_settlements(ledger, on=False)
        ledger.maintain()
        assert (rows_of(store)["r1"].completion_tokens, ledger.status().spooled) == (3, 0)
    assert [record.message for record in caplog.records] == [
        "settlements cannot be spooled (No space left on device); they are kept in memory"
    ]
    check_integrity(store)


def test_a_kill_in_the_middle_of_settling_is_spooled(store, ledger, reserve_of, monkeypatch):
    """A greenlet killed inside the settlement's transaction loses nothing."""
    lease = ledger.reserve(reserve_of("r1"))

    def killed(*_arguments, **_options):
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr("mlflow_llm.serving.metering.ledger.ledger.settle_all", killed)
        with pytest.raises(SystemExit):
            lease.settle(completion=3)
    ledger.maintain()
    assert rows_of(store)["r1"].completion_tokens == 3


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
def test_an_admission_whose_answer_was_lost_is_undone(store, ledger, reserve_of, monkeypatch):
    """The commit went through but the caller was told 503: the row is closed with nothing used."""
    Limits(store).set("tenant", "acme", "in_flight", 1)
    write = store.write

    def lost(work, *, timeout=None):
        write(work, timeout=timeout)
        raise Unavailable("the metering store does not answer")

    with monkeypatch.context() as patched:
        ledger.reserve(reserve_of("first")).settle()  # the window exists: one write an admission from here on
        patched.setattr(store, "write", lost)
        with pytest.raises(Unavailable):
            ledger.reserve(reserve_of("r1"))
    assert rows_of(store)["r1"].status == "open"
    ledger.maintain()
    assert (rows_of(store)["r1"].status, rows_of(store)["r1"].cost) == ("error", 0)
    check_integrity(store)


def test_a_row_that_nothing_holds_is_closed(store, ledger, reserve_of, clock):
    """An admission that ended inside its transaction: its row is closed after a while, and may still become exact."""
    kept, lost = ledger.reserve(reserve_of("kept")), ledger.reserve(reserve_of("lost"))
    forget(ledger, "lost")
    ledger.maintain()
    clock.now += 29
    ledger.maintain()
    assert rows_of(store)["lost"].status == "open"
    clock.now += 2
    ledger.maintain()
    rows = rows_of(store)
    assert (rows["lost"].status, rows["lost"].cost, rows["kept"].status) == ("recovered", 0, "open")
    lost.settle(completion=3)
    kept.settle()
    assert (rows_of(store)["lost"].status, rows_of(store)["lost"].completion_tokens) == ("ok", 3)
    check_integrity(store)


def test_a_forked_child_has_an_owner_of_its_own(store, ledger, reserve_of):
    """After a fork the child neither settles the parent's leases nor holds its lock."""
    lease = ledger.reserve(reserve_of("parent"))
    script = f"""
import os, sys
from mlflow_llm.serving.metering import Ledger, Store
from ledger_rows import reservation
ledger = Ledger(Store({store.engine.url.render_as_string(hide_password=False)!r}),
                state_dir={str(ledger.state_dir.parent)!r}, clock=lambda: {ledger.now_ms() / 1000})
ledger.reserve(reservation("before"))
child = os.fork()
if child == 0:
    lease = ledger.reserve(reservation("child"))
    lease.settle(completion=1)
    ledger.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
os._exit(0)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=240)
    assert rows_of(store)["child"].completion_tokens == 1
    assert ledger.recover() == 1  # "before", of the parent that has ended
    assert rows_of(store)["parent"].status == "open"
    lease.settle()


def test_processes_killed_at_random_leave_exact_sums(store_url, store, tmp_path, reserve_of):
    """8 processes reserve, count and settle and are killed with SIGKILL all the time; every row is right at the end."""
    limits = Limits(store)
    limits.set("tenant", "acme", "in_flight", 6)
    limits.set("key", "key_0", "otpm", 3000)
    limits.set("user", "chat1", "qph", 10**6)
    draw = random.Random(7)
    started = 0

    def start() -> subprocess.Popen[bytes]:
        nonlocal started
        started += 1
        name = f"w{started}"
        truth = tmp_path / f"{name}.truth"
        command = [sys.executable, str(WORKER), store_url, str(tmp_path / "state"), str(truth), name, "400"]
        return subprocess.Popen(command)

    workers = [start() for _ in range(8)]
    try:
        while started < 16:
            time.sleep(0.5)
            place = draw.randrange(len(workers))
            workers[place].send_signal(signal.SIGKILL)
            workers[place].wait()
            workers[place] = start()
        time.sleep(2)
        for worker in workers[:4]:
            worker.send_signal(signal.SIGKILL)
        for worker in workers:
            worker.wait(timeout=240)
    finally:
        for worker in workers:
            worker.kill()
    last = Ledger(store, state_dir=tmp_path / "state")
    last.maintain()
    last.close()
    _compare(rows_of(store), tmp_path)
    check_integrity(store)
    assert not list((last.state_dir / "owners").iterdir())


def _compare(rows, truths: Path) -> None:
    """Check that every certain step is in the ledger, a step hit by a kill possibly, and nothing else."""
    checked = 0
    for truth in truths.glob("*.truth"):
        lines = [line.split() for line in truth.read_text().splitlines()]
        tokens: dict[str, int] = defaultdict(int)
        refused = {request_id for what, request_id, _ in lines if what == "refused"}
        for _, request_id, count in lines:
            tokens[request_id] += int(count)
        last_what, last_id, last_count = lines[-1]
        for request_id, total in tokens.items():
            if request_id in refused:
                assert request_id not in rows
                continue
            if request_id == last_id and last_what == "reserve" and request_id not in rows:
                continue
            row = rows.pop(request_id)
            allowed = {total}
            if request_id == last_id and last_what == "count":
                allowed.add(total - int(last_count))
            assert row.completion_tokens in allowed
            assert row.status in ("ok", "recovered")
            checked += 1
    assert checked > 100
    assert not rows


def test_cut_connections_bill_nothing_twice(postgres_server, tmp_path, reserve_of, request):
    """PostgreSQL ends every connection again and again under load: each request is there once and exact."""
    import psycopg

    url = new_database(postgres_server)
    name = url.rpartition("/")[2]
    admin = psycopg.connect(postgres_server.replace("+psycopg", "") + "/postgres", autocommit=True)
    store = Store(url)
    ledger = Ledger(store, state_dir=tmp_path / "state")
    Limits(store).set("tenant", "acme", "otpm", 10**9)
    admitted: dict[str, int] = {}

    def load(worker: int) -> None:
        for number in range(60):
            request_id = f"{worker}-{number}"
            try:
                with ledger.reserve(reserve_of(request_id)) as lease:
                    lease.count(number % 7)
                    admitted[request_id] = number % 7
            except Unavailable:
                time.sleep(0.05)

    threads = [threading.Thread(target=load, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    admin.close()
    ledger.maintain()
    rows = rows_of(store)
    assert {request_id: row.completion_tokens for request_id, row in rows.items() if request_id in admitted} == admitted
    assert all(row.status != "open" for row in rows.values())
    assert sum(row.completion_tokens for row in rows.values()) == sum(admitted.values())
    check_integrity(store)
    ledger.close()
    store.close()
