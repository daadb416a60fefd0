"""Rows of batches between processes, each a ledger of its own on one database."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from mlflow_llm.serving.batches.batches import Batches
from mlflow_llm.serving.batches.contents import content_of
from mlflow_llm.serving.batches.files import Files
from mlflow_llm.serving.batches.objects import DONE, FAILED, PENDING
from mlflow_llm.serving.batches.rows import Rows
from mlflow_llm.serving.batches.upkeep import Upkeep
from mlflow_llm.serving.interface.errors import NotFound
from mlflow_llm.serving.metering import ANONYMOUS, Ledger, Price, Reservation, Store, Usage, UsageFilter
from mlflow_llm.serving.metering.store.tables import batch_rows, owners

NOW = 1_800_000_000_000
LINE = b'{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'


@dataclasses.dataclass
class Place:
    """A database with a batch of five rows, and two processes."""

    store: Store
    ledgers: list[Ledger]
    batch_id: str
    state: Path

    @property
    def rows(self) -> Rows:
        return Rows(self.store)


@pytest.fixture
def place(store_url: str, tmp_path: Path) -> Iterator[Place]:
    store = Store(store_url)
    ledgers = [Ledger(store, state_dir=tmp_path / str(i), clock=lambda: NOW / 1000) for i in range(2)]
    for ledger in ledgers:
        ledger.maintain()
    ledgers[0].prices.set("*", Price(input=1_000_000, output=1_000_000), effective=NOW / 1000)
    content = b"".join(LINE % i for i in range(5))
    kept = {"tenant": "default", "key_id": "anonymous", "now_ms": NOW, "seconds": 7200, "maximum": 10**6}
    file = Files(store).create(content, filename="a", **kept)
    batch = Batches(store).create(
        ANONYMOUS,
        endpoint="/v1/completions",
        input_file_id=file["id"],
        completion_window="24h",
        metadata=None,
        output_seconds=7200,
        now_ms=NOW,
        max_open=100,
    )
    upkeep = Upkeep(store, 100)
    upkeep.validate(upkeep.active()[0], ledgers[0].owner, NOW)
    yield Place(store, ledgers, batch["id"], tmp_path)
    for ledger in ledgers:
        ledger.close()
    store.close()


def reserve(ledger: Ledger, request_id: str):  # type: ignore[no-untyped-def]
    lease = ledger.reserve(
        Reservation(
            request_id=request_id,
            key_id="anonymous",
            tenant="default",
            endpoint="e",
            entity="m",
            mode="batch",
            task="completions",
            input_tokens=10,
            max_output_tokens=20,
            background=True,
        )
    )
    lease.hold()
    return lease


def test_two_processes_never_hold_one_row(place: Place) -> None:
    """Claims of two processes have no row in common, and no more rows than there are."""
    first = place.rows.claim(place.batch_id, place.ledgers[0].owner, 3, NOW)
    second = place.rows.claim(place.batch_id, place.ledgers[1].owner, 3, NOW)
    assert [row.custom_id for row in first + second] == ["0", "1", "2", "3", "4"]
    assert first[2].line == LINE % 2
    assert place.rows.claim(place.batch_id, place.ledgers[0].owner, 3, NOW) == []


def test_a_process_that_was_taken_for_dead_stores_and_bills_nothing(place: Place) -> None:
    """When a row was given to another process, the first one's reply is dropped and costs nothing."""
    dead, other = place.ledgers
    (late,) = place.rows.claim(place.batch_id, dead.owner, 1, NOW)
    leases = [reserve(dead, "first"), reserve(other, "second")]
    gone = sa.delete(owners).where(owners.c.owner == dead.owner)
    place.store.write(lambda connection: connection.execute(gone))
    assert place.rows.free_dead() == 1
    (again,) = place.rows.claim(place.batch_id, other.owner, 1, NOW)
    assert (again.number, again.attempt, again.crashes) == (late.number, late.attempt + 1, 1)
    for lease in leases:
        lease.settle(prompt=10, completion=7, finish_reason="stop")
    assert not place.rows.finish(late, dead.owner, DONE, output=b"late\n", settlement=leases[0].settlement)
    assert place.rows.finish(again, other.owner, DONE, output=b"good\n", settlement=leases[1].settlement)
    assert not place.rows.finish(again, other.owner, DONE, output=b"twice\n", settlement=leases[1].settlement)
    for lease in leases:
        lease.drop()
    found = {row.request_id: (row.status, row.cost) for row in Usage(place.store).rows(UsageFilter())}
    assert found == {"first": ("error", 0), "second": ("ok", 17)}


def test_a_process_that_ends_before_it_stores_a_reply_costs_nothing(place: Place) -> None:
    """A lease that is held when its process ends is closed with nothing billed, though the reply was complete."""
    lease = reserve(place.ledgers[0], "lost")
    lease.count(5)
    lease.settle(prompt=10, completion=7, finish_reason="stop")
    place.ledgers[0].maintain()  # its checkpoint
    place.ledgers[0].close()
    with contextlib.closing(Ledger(place.store, state_dir=place.state / "0")) as next_one:
        assert next_one.recover() == 1
    (row,) = Usage(place.store).rows(UsageFilter())
    assert (row.status, row.cost, row.prompt_tokens, row.completion_tokens) == ("recovered", 0, 0, 0)


def test_outputs_go_with_their_file(place: Place) -> None:
    """A batch's files have the rows of their kind in order, and when one is deleted its rows lose their outputs."""
    owner = place.ledgers[0].owner
    for row in place.rows.claim(place.batch_id, owner, 4, NOW):
        place.rows.finish(row, owner, FAILED if row.number == 2 else DONE, output=b"%d\n" % row.number)
    upkeep = Upkeep(place.store, 100)
    (batch,) = upkeep.active()
    assert not upkeep.end(batch, "completed", NOW)  # a row is pending
    assert upkeep.end(batch, "expired", NOW)
    assert not upkeep.end(batch, "expired", NOW)
    shown = Batches(place.store).get(place.batch_id, "default")
    assert b"".join(content_of(place.store, shown["output_file_id"], "default")) == b"1\n3\n4\n"
    errors = b"".join(content_of(place.store, shown["error_file_id"], "default"))
    assert errors.startswith(b"2\n{")
    assert Files(place.store).get(shown["error_file_id"], "default")["bytes"] == len(errors)
    Files(place.store).delete(shown["output_file_id"], "default")
    with pytest.raises(NotFound):
        content_of(place.store, shown["output_file_id"], "default")
    kept = sa.select(batch_rows.c.number).where(batch_rows.c.output.is_not(None))
    assert place.store.read(lambda connection: connection.execute(kept).scalars().all()) == [2]


def test_a_row_that_is_given_back_waits_for_its_time(place: Place) -> None:
    """A row that was refused for the moment is not claimed before its time."""
    owner = place.ledgers[0].owner
    (row,) = place.rows.claim(place.batch_id, owner, 1, NOW)
    place.rows.finish(row, owner, PENDING, retry_ms=NOW + 1000)
    assert [one.number for one in place.rows.claim(place.batch_id, owner, 9, NOW)] == [2, 3, 4, 5]
    assert [one.number for one in place.rows.claim(place.batch_id, owner, 9, NOW + 1000)] == [1]


def test_old_files_are_removed_but_not_those_of_a_batch_that_runs(place: Place) -> None:
    """A file whose time is over stays as long as a batch reads it."""
    later = NOW + 8_000_000
    assert Files(place.store).remove_old(later) == 0
    upkeep = Upkeep(place.store, 100)
    assert upkeep.end(upkeep.active()[0], "cancelled", NOW)
    assert Files(place.store).remove_old(later) == 1
