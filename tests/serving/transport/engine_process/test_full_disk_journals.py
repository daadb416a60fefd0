"""Engine journals on a disk that is full for a while: no count of a generated token is short afterwards."""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from pathlib import Path

import pytest
from transport_place import completion

from mlflow_llm.serving.interface.events import Finished, Tokens
from mlflow_llm.serving.system.journal import Journal, journals
from mlflow_llm.serving.transport.engine_process import journal as module
from mlflow_llm.serving.transport.engine_process.journal import MeteredRequests


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try a journal that could not be written again at once."""
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "engines"


def run(metered: MeteredRequests, root: Path, name: str, tokens: int, *, ends: bool = True) -> None:
    """Run a request that generates ``tokens``, one a step."""
    metered.begin(name, completion(name, max_tokens=64), str(root))
    for _ in range(tokens):
        metered.count([(name, name, Tokens(0, (7,)))])
    if ends:
        metered.count([(name, name, Finished(0, "length", 0, tokens))])


def written(root: Path) -> Counter[str]:
    """Return the tokens that a reader of all journals finds once their engines have ended."""
    found: Counter[str] = Counter()
    for journal in journals(root):
        for one in (*journal.ended(0, 1000)[0], *journal.running()):
            found[one.request_id] += one.tokens
    return found


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_ends_that_could_not_be_written_are_written_later(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that end, run and begin while the disk is full are counted to the last token; it is logged twice: when
    the journal cannot be written, and when it is written again.
    """
    metered = MeteredRequests("generation")
    run(metered, root, "before", 2)
    run(metered, root, "across", 3, ends=False)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(Journal, "append", full)
        run(metered, root, "meanwhile", 4)
        run(metered, root, "begun", 1, ends=False)
        metered.write_late()
    metered.count([("across", "across", Tokens(0, (7, 7))), ("across", "across", Finished(0, "length", 0, 5))])
    metered.count([("begun", "begun", Tokens(0, (7, 7))), ("begun", "begun", Finished(0, "length", 0, 3))])
    with caplog.at_level(logging.WARNING):
        metered.write_late()
    run(metered, root, "after", 6)
    (journal,) = journals(root)
    ended = {one.request_id: one.tokens for one in journal.ended(0, 100)[0]}
    assert ended == {"before": 2, "across": 5, "meanwhile": 4, "begun": 3, "after": 6}
    assert len([record for record in caplog.records if "journal" in record.getMessage()]) == 2
    metered.close()


def test_an_engine_killed_on_a_full_disk_has_its_counts_in_the_slots(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose end could not be written is found in its slot when the engine has ended."""
    metered = MeteredRequests("generation")
    run(metered, root, "one", 2, ends=False)
    monkeypatch.setattr(Journal, "append", full)
    metered.count([("one", "one", Tokens(0, (7,))), ("one", "one", Finished(0, "length", 0, 3))])
    run(metered, root, "two", 4)
    assert written(root) == {"one": 3, "two": 4}


def test_a_journal_that_could_not_be_made_is_made_later(root: Path) -> None:
    """Counts of requests that began, or ended, before their journal could be made are in it afterwards."""
    root.write_text("not a directory")
    metered = MeteredRequests("generation")
    run(metered, root, "ended", 2)
    run(metered, root, "running", 3, ends=False)
    root.unlink()
    metered.count([("running", "running", Tokens(0, (7,)))])
    metered.write_late()
    assert written(root) == {"ended": 2, "running": 4}
    metered.close()


def test_a_journal_that_cannot_grow_leaves_nothing_behind(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk at the first write of a new journal leaves no directory that a reader would wait for."""
    monkeypatch.setattr("mlflow_llm.serving.system.journal.ProgressFile", full)
    with pytest.raises(OSError, match="No space"):
        Journal(root, "engine-1")
    assert list(root.iterdir()) == []
