"""Read the counts of engines on other hosts into the ledger: what this host keeps, or what their hosts keep."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ...interface.errors import ServingError, Unavailable
from ...metering.ledger.engine_journals import collect, collect_remote
from ...metering.ledger.store_directory import open_directory
from ...metering.store.store import Store
from ...system.journal import DONE, Generated
from ...transport.client.client import RemoteEngine

logger = logging.getLogger(__name__)

READ_SECONDS = 2.0


class JournalReader:
    """A reader of journals on a thread of its own: ``read`` adds what is new in them to the ledger."""

    def __init__(self, read: Callable[[], object]) -> None:
        self._read = read
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-journals", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(READ_SECONDS):
            self.read()

    def read(self) -> None:
        """Read once. A store or an engine that does not answer is asked again the next time."""
        try:
            self._read()
        except Unavailable:
            pass  # others say so
        except Exception:
            logger.exception("the engines' journals could not be read; they are read again")

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()


class HostJournals(JournalReader):
    """The journals that this host keeps for the ledger of ``store``, below ``state_dir``. Raises ``Unavailable``."""

    def __init__(self, store: Store, state_dir: Path) -> None:
        self.root = str(state_dir)
        super().__init__(functools.partial(collect, store, open_directory(store, state_dir)))

    def close(self) -> None:
        """Stop the thread, and read what engines that have ended have left."""
        super().close()
        self.read()


class EngineJournal:
    """A journal that the host of ``engine`` keeps. Methods raise ``ServingError`` if the engine does not answer."""

    def __init__(self, engine: RemoteEngine, name: str) -> None:
        self._engine, self.name = engine, name

    def after(self, position: int, limit: int) -> tuple[list[Generated], int]:
        """Return the next counts after ``position``, as many as the engine's host sends at once."""
        page = self._engine.read_journal(self.name, position)
        return list(page.counts), page.position

    def forget(self, position: int) -> None:
        """Leave it to the next question: its position says what has been read."""

    def remove(self) -> bool:
        """Have the engine's host remove the journal, of which everything has been read."""
        return self._engine.read_journal(self.name, DONE).position == DONE


def read_engines(store: Store, engines: Iterable[RemoteEngine]) -> int:
    """Add the new counts of engines on other hosts to the ledger, and return how many. Raises ``Unavailable``."""
    return collect_remote(store, _journals(engines))


def _journals(engines: Iterable[RemoteEngine]) -> Iterator[EngineJournal]:
    for engine in engines:
        try:
            names = engine.read_journal().names
        except ServingError as error:
            logger.info("an engine's journals: %s", error)
            continue
        yield from (EngineJournal(engine, name) for name in names)
