"""Token counts of engine journals, entered into the ledger exactly once whichever process is killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from mlflow_llm.serving.metering import Usage, UsageFilter
from mlflow_llm.serving.metering.ledger import engine_journals as collecting
from mlflow_llm.serving.metering.ledger.engine_journals import collect
from mlflow_llm.serving.system import journal as journal_module
from mlflow_llm.serving.system.journal import Journal, WrittenJournal


def generated(store):
    return {row.request_id: row.generated_tokens for row in Usage(store).rows(UsageFilter())}


@pytest.fixture
def rows(ledger, reserve_of):
    for number in range(6):
        ledger.reserve(reserve_of(f"r{number}")).settle(completion=1)


@pytest.fixture
def root(ledger):
    return ledger.journal_dir


def run(journal, request_id, tokens):
    entry = journal.begin(request_id)
    for _ in range(tokens):
        journal.count(entry, 1)
    return entry


def test_ended_requests_come_while_the_engine_lives(store, ledger, rows, root):
    """Ended requests are booked once each, running ones when they end, and counts from another engine are added."""
    journal = Journal(root, "engine-1")
    journal.end([run(journal, "r0", 3), run(journal, "r1", 2)])
    running = run(journal, "r2", 5)
    assert collect(store, ledger.state_dir) == 2
    assert collect(store, ledger.state_dir) == 0
    journal.end([running])
    second = Journal(root, "engine-2")
    second.end([run(second, "r0", 4)])
    assert collect(store, ledger.state_dir) == 2
    assert generated(store) == {"r0": 7, "r1": 2, "r2": 5, "r3": 0, "r4": 0, "r5": 0}
    for open_journal in (journal, second):
        open_journal.close()


def test_a_dead_engines_running_requests_are_counted(store, ledger, rows, root):
    """A dead engine's running requests are booked up to the last counted token, once, and its directory is removed."""
    journal = Journal(root, "engine-1")
    journal.end([run(journal, "r0", 3)])
    run(journal, "r1", 4)
    run(journal, "r2", 0)
    journal.close()
    assert collect(store, ledger.state_dir) == 2
    assert not (root / "engine-1").exists()
    assert collect(store, ledger.state_dir) == 0
    assert (generated(store)["r0"], generated(store)["r1"], generated(store)["r2"]) == (3, 4, 0)


def test_a_line_whose_slot_is_still_there_counts_once(store, ledger, rows, root, monkeypatch):
    """A request is booked once if a kill left both its journal line and its slot."""
    journal = Journal(root, "engine-1")
    entry = run(journal, "r0", 3)
    monkeypatch.setattr(journal.running, "give_back", lambda slot: None)
    journal.end([entry])
    with open(journal.directory / f"ended-{0:016d}", "ab") as torn:
        torn.write(b"7 12 r")
    journal.close()
    collect(store, ledger.state_dir)
    assert generated(store)["r0"] == 3


def test_files_are_read_in_turn_and_removed(store, ledger, rows, root, monkeypatch):
    """Many small files and batches: all counts arrive, and only the newest file is kept."""
    monkeypatch.setattr(journal_module, "FILE_BYTES", 20)
    monkeypatch.setattr(collecting, "BATCH_ROWS", 4)
    journal = Journal(root, "engine-1")
    for number in range(60):
        journal.end([run(journal, f"r{number % 6}", number)])
    assert len(list(journal.directory.glob("ended-*"))) > 10
    assert collect(store, ledger.state_dir) == 59  # a request without a token needs no line
    assert len(list(journal.directory.glob("ended-*"))) == 1
    assert generated(store) == {f"r{n}": sum(range(n, 60, 6)) for n in range(6)}
    journal.close()


def test_a_reader_that_is_killed_adds_nothing_twice(store, ledger, rows, root, monkeypatch):
    """The end of the journal is in the store before the directory goes."""
    journal = Journal(root, "engine-1")
    run(journal, "r0", 3)
    journal.close()
    with monkeypatch.context() as patched:
        patched.setattr(WrittenJournal, "remove", lambda self: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            collect(store, ledger.state_dir)
    assert collect(store, ledger.state_dir) == 0
    assert generated(store)["r0"] == 3
    assert not (root / "engine-1").exists()


WRITER = """
import sys, time
from pathlib import Path
from mlflow_llm.serving.system.journal import Journal
journal = Journal(Path(sys.argv[1]), sys.argv[2])
while True:
    entries = [journal.begin(f"r{number}") for number in range(6)]
    for _ in range(3):
        for entry in entries:
            print(entry.request_id, flush=True)  # printed first, so that a kill leaves at most the last one uncounted
            journal.count(entry, 1)
    journal.end(entries)
    time.sleep(0.001)
"""


def test_an_engine_killed_at_random(store, ledger, rows, root, tmp_path):
    """Killed with SIGKILL anywhere, its counts are right to the last token."""
    draw, minimum, maximum = random.Random(3), Counter(), Counter()
    for number in range(5):
        said = tmp_path / f"said-{number}"
        with open(said, "wb") as out:
            writer = subprocess.Popen([sys.executable, "-c", WRITER, str(root), f"engine-{number}"], stdout=out)
            while said.stat().st_size < draw.randrange(100, 20_000):
                time.sleep(0.002)
                collect(store, ledger.state_dir)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        collect(store, ledger.state_dir)
        lines = said.read_text().splitlines()
        maximum.update(lines)
        minimum.update(lines[:-1])
    found = Counter(generated(store))
    assert minimum <= found <= maximum
    assert list(root.iterdir()) == []
