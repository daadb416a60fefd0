"""A disk that is full, fails, or loses power under the ledger, and processes that end meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os

import pytest
from ledger_rows import die, reservation, rows_of

from mlflow_llm.serving.interface.errors import Unavailable
from mlflow_llm.serving.metering import Ledger
from mlflow_llm.serving.metering.ledger import count_audit, engine_journals, lease_owner
from mlflow_llm.serving.metering.ledger.spool import Spool
from mlflow_llm.serving.system.journal import Journal


@contextlib.contextmanager
def full_disk(monkeypatch, module, *names):
    """Let the functions of ``module`` with these names fail as on a full disk, for the block."""

    def full(*_arguments, **_named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        for name in names:
            patched.setattr(module, name, full)
        yield


@pytest.mark.parametrize("failing", ["create_locked_directory", "ProgressFile", "sync_directory"])
def test_a_process_that_begins_on_a_full_disk_refuses_by_name(ledger, store, tmp_path, monkeypatch, caplog, failing):
    """Without room for a process's directory requests are refused with the reason, and admitted when there is room;
    upkeep starts and says so, and no directory is left over."""
    with full_disk(monkeypatch, lease_owner, failing):
        ledger.start(interval=1000.0)
        for _ in range(2):
            with pytest.raises(
                Unavailable, match=r"no room to keep the progress of a request \(No space left on device\)"
            ):
                ledger.reserve(reservation("r1"))
            with pytest.raises(Unavailable, match="no room"):
                ledger.maintain()
        assert ledger.away_seconds == 0.0
    assert "nothing is admitted: no room to keep the progress" in caplog.text
    assert "Traceback" not in caplog.text
    assert not list(tmp_path.glob("state/*/owners/*"))
    ledger.reserve(reservation("r1")).settle()
    assert rows_of(store)["r1"].status == "ok"


def test_a_journal_that_cannot_be_locked_stops_no_upkeep(ledger, store, monkeypatch):
    """On a disk without room for a reader's lock, journals wait, and the rest of the upkeep is done."""
    journal = Journal(ledger.journal_dir, "engine-1")
    journal.count(journal.begin("r1"), 5)
    journal.close()
    lease = ledger.reserve(reservation("r1"))
    lease.count(5)
    lease.settle()
    ledger.reserve(reservation("r2"))
    with full_disk(monkeypatch, engine_journals, "try_acquire"):
        ledger.maintain()
        assert ledger.status().open_rows == 1
    ledger.maintain()
    assert rows_of(store)["r1"].generated_tokens == 5


def test_what_is_kept_in_memory_is_settled_when_the_process_ends(ledger, store, monkeypatch):
    """A settlement that neither the store nor the disk took is settled exactly at an orderly end."""
    lease = ledger.reserve(reservation("r1"))
    lease.count(5)
    with monkeypatch.context() as patched:
        patched.setattr(ledger, "settled_in_store", lambda settlement, tenant: False)
        with full_disk(monkeypatch, Spool, "append"):
            lease.settle(completion=9, finish_reason="stop")
    assert rows_of(store)["r1"].status == "open"
    ledger.close()
    assert (rows_of(store)["r1"].status, rows_of(store)["r1"].completion_tokens) == ("ok", 9)


def test_an_admission_that_meets_the_end_of_its_process_is_undone(ledger, store, monkeypatch):
    """A request whose admission is committed while its process ends is refused and closed with nothing used; one that
    comes later is refused."""
    commit = store.write

    def ending(work, **named):
        result = commit(work, **named)
        monkeypatch.undo()
        ledger.close()
        return result

    monkeypatch.setattr(store, "write", ending)
    for name in ("r1", "r2"):
        with pytest.raises(Unavailable, match="this process is ending"):
            ledger.reserve(reservation(name))
    assert {name: (row.status, row.cost) for name, row in rows_of(store).items()} == {"r1": ("error", 0)}


def test_an_admission_that_fails_after_the_end_of_its_process_says_why(ledger, store, monkeypatch):
    """A request whose admission the store refuses while its process ends gets that refusal."""

    def ending(work, **named):
        monkeypatch.undo()
        ledger.close()
        raise Unavailable("the metering store does not answer")

    monkeypatch.setattr(store, "write", ending)
    with pytest.raises(Unavailable, match="the metering store does not answer"):
        ledger.reserve(reservation("r1"))
    assert rows_of(store) == {}


def test_a_process_has_its_directory_on_the_disk_before_it_admits(ledger, tmp_path, monkeypatch):
    """Each directory above the spool is synced, so that a loss of power takes no spooled settlement with it."""
    synced = []
    monkeypatch.setattr(lease_owner, "sync_directory", lambda path: synced.append(path.relative_to(tmp_path)))
    lease = ledger.reserve(reservation("r1"))
    (owners,) = tmp_path.glob("state/*/owners")
    assert synced == [path.relative_to(tmp_path) for path in (owners, owners.parent, owners.parent.parent)]
    lease.settle()


def test_a_short_count_is_found_after_the_end_of_the_process_that_settled_it(ledger, store, tmp_path, clock):
    """A process that begins looks at the rows of the last hour too: the one that settled them may have ended since."""
    other = Ledger(store, state_dir=tmp_path / "state", clock=clock, monotonic=clock)
    lease = other.reserve(reservation("r1"))
    lease.count(5)
    lease.settle()
    die(other)
    ledger.maintain()
    assert rows_of(store)["r1"].generated_tokens == 0
    clock.now += count_audit.AUDIT_SECONDS + 1
    ledger.maintain()
    assert rows_of(store)["r1"].generated_tokens == 5
