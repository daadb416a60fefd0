"""Journal what the engine generates for clients that keep a ledger."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from pathlib import Path

from ...interface.engine import Client, EngineOutput
from ...interface.events import Failed, Tokens, is_terminal
from ...interface.request import POOLED, ValidRequest
from ...system.journal import Journal, JournalEntry

logger = logging.getLogger(__name__)


class _Metered:
    """An in-flight request with its journal entry; ``left`` is how many of its sequences have not ended."""

    __slots__ = ("entry", "journal", "left")

    def __init__(self, journal: Journal, entry: JournalEntry, left: int) -> None:
        self.journal, self.entry, self.left = journal, entry, left


class MeteredRequests:
    """The journals of an engine process and the requests counted in them.

    A journal that cannot be written is logged and not used again; serving continues.
    """

    def __init__(self, generation: str) -> None:
        self._generation = generation
        self._journals: dict[str, Journal | None] = {}
        self._running: dict[Client, _Metered] = {}

    def begin(self, client: Client, request: ValidRequest, root: str) -> None:
        """Count ``request`` in the journal under ``root``; "" counts nothing.

        ``client`` is the value that the core returns with the request's events.
        """
        journal = self._journal(root) if root and request.task not in POOLED else None
        if journal is None:
            return
        try:
            metered = _Metered(journal, journal.begin(request.request_id), len(request.sequences))
        except OSError:
            self._give_up(journal)
        else:
            self._running[client] = metered

    def count(self, outputs: Iterable[EngineOutput]) -> None:
        """Count everything a step produced, whether or not a client still waits for it. Call this before sending."""
        ended: dict[Journal, list[JournalEntry]] = {}
        for client, _, event in outputs:
            metered = self._running.get(client)
            if metered is None:
                continue
            if isinstance(event, Tokens):
                metered.journal.count(metered.entry, len(event.token_ids))
            elif is_terminal(event):
                metered.left = 0 if isinstance(event, Failed) else metered.left - 1
                if not metered.left:
                    del self._running[client]
                    ended.setdefault(metered.journal, []).append(metered.entry)
        for journal, entries in ended.items():
            try:
                journal.end(entries)
            except OSError:
                self._give_up(journal)

    def _journal(self, root: str) -> Journal | None:
        if root not in self._journals:
            try:
                # one store may read two directories (of two hosts or users) with journals of this engine: names differ
                self._journals[root] = Journal(Path(root), f"{self._generation}.{secrets.token_hex(4)}")
            except OSError:
                logger.exception("no journal can be written in %s", root)
                self._journals[root] = None
        return self._journals[root]

    def _give_up(self, journal: Journal) -> None:
        logger.exception("the journal %s cannot be written; what is generated from here on is not counted", journal)
        self._journals = {root: None if kept is journal else kept for root, kept in self._journals.items()}
        self._running = {key: kept for key, kept in self._running.items() if kept.journal is not journal}
