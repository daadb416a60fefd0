"""A ledger over a real store and a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_rows import reservation

from mlflow_llm.serving.metering import Ledger, Store


class Clock:
    """A clock that moves when told to."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reserve_of():
    return reservation


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    opened = Store(store_url)
    yield opened
    opened.close()


@pytest.fixture
def ledger(store: Store, tmp_path: Path, clock: Clock) -> Iterator[Ledger]:
    opened = Ledger(store, state_dir=tmp_path / "state", clock=clock, monotonic=clock)
    yield opened
    opened.close()
