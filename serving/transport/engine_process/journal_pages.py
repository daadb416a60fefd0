"""Answer clients on other hosts that read the journals which this host keeps for their store."""

from __future__ import annotations

from pathlib import Path

from ...system.journal import DONE, WrittenJournal, journals
from ..protocol import JournalPage, ReadJournal

PAGE_COUNTS = 200


def read_page(root: str, asked: ReadJournal) -> JournalPage:
    """Return the names or counts that a client asks for; ``root`` has the journals of its store, "" for none.

    A journal that cannot be read now gives nothing new; a client that names none of this store's is told that it is
    done.
    """
    if not root:
        return JournalPage(asked.call)
    found = {one.name: one for one in journals(Path(root))}
    if not asked.name:
        return JournalPage(asked.call, names=tuple(found))
    journal = found.get(asked.name)
    if journal is None:
        return JournalPage(asked.call, position=asked.position)
    try:
        return _page(journal, asked)
    except OSError:  # a full disk, or another client's question has just removed it
        return JournalPage(asked.call, position=asked.position)


def _page(journal: WrittenJournal, asked: ReadJournal) -> JournalPage:
    if asked.position == DONE:
        if journal.is_final():
            journal.remove()
        return JournalPage(asked.call, position=DONE)
    journal.forget(asked.position)
    counts, position = journal.after(asked.position, PAGE_COUNTS)
    return JournalPage(asked.call, counts=tuple(counts), position=position)
