"""Journal what the engine generates for clients that keep a ledger."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from ...interface.engine import Client, EngineOutput
from ...interface.events import Failed, Tokens, is_terminal
from ...interface.request import POOLED, ValidRequest
from ...system.journal import Journal, JournalEntry

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
"""A journal that could not be written is tried again after this time."""


class _Metered:
    """A request with its tokens so far and, unless its journal could not be written yet, its entry there; ``left`` is
    how many of its sequences have not ended."""

    __slots__ = ("entry", "left", "request_id", "root", "tokens")

    def __init__(self, root: str, request_id: str, left: int) -> None:
        self.root, self.request_id, self.left = root, request_id, left
        self.entry: JournalEntry | None = None
        self.tokens = 0


class MeteredRequests:
    """The journals of an engine process and the requests counted in them.

    While a journal cannot be written (a full disk), its counts wait: those of requests that have a slot in it are safe
    there, others are in memory. They are written as soon as it can be written again, so that no count is short.
    """

    def __init__(self, generation: str) -> None:
        self._generation = generation
        self._journals: dict[str, Journal] = {}
        self._running: dict[Client, _Metered] = {}
        self._late: deque[_Metered] = deque()  # requests that have ended, and whose ends are not in the journal yet
        self._failed: dict[str, float] = {}  # by root: when its journal is tried again

    def begin(self, client: Client, request: ValidRequest, root: str) -> None:
        """Count ``request`` in the journal under ``root``; "" counts nothing.

        ``client`` is the value that the core returns with the request's events.
        """
        if root and request.task not in POOLED:
            metered = self._running[client] = _Metered(root, request.request_id, len(request.sequences))
            self._enter(metered)

    def count(self, outputs: Iterable[EngineOutput]) -> None:
        """Count everything a step produced, whether or not a client still waits for it. Call this before sending."""
        ended: dict[str, list[_Metered]] = {}
        for client, _, event in outputs:
            metered = self._running.get(client)
            if metered is None:
                continue
            if isinstance(event, Tokens):
                metered.tokens += len(event.token_ids)
                if metered.entry is not None:
                    self._journals[metered.root].count(metered.entry, len(event.token_ids))
                elif self._failed:
                    self._enter(metered)
            elif is_terminal(event):
                metered.left = 0 if isinstance(event, Failed) else metered.left - 1
                if not metered.left:
                    del self._running[client]
                    ended.setdefault(metered.root, []).append(metered)
        for root, each in ended.items():
            self._end(root, each)

    def write_late(self) -> None:
        """Write the ends of requests that could not be written before; called from time to time."""
        for _ in range(len(self._late)):
            metered = self._late.popleft()
            self._end(metered.root, [metered])

    def close(self) -> None:
        """Close the journals; requests that are still running stay in their slots, as after a kill."""
        self._failed.clear()
        self.write_late()
        for journal in self._journals.values():
            journal.close()

    def _enter(self, metered: _Metered) -> None:
        """Give ``metered`` a slot in its journal with its tokens so far, if the journal can be written."""
        if self._waits(metered.root):
            return
        try:
            journal = self._journal(metered.root)
            entry = journal.begin(metered.request_id)
        except OSError as error:
            self._note(metered.root, error)
            return
        metered.entry = entry
        journal.count(entry, metered.tokens)

    def _end(self, root: str, each: list[_Metered]) -> None:
        for metered in each:
            if metered.entry is None and metered.tokens:
                self._enter(metered)
        entries = [metered.entry for metered in each if metered.entry is not None]
        late = [metered for metered in each if metered.entry is None and metered.tokens]
        if entries and self._waits(root):
            late = each
        elif entries:
            try:
                self._journals[root].end(entries)
            except OSError as error:
                self._note(root, error)
                late = each
            else:
                self._note(root, None)
        self._late.extend(late)

    def _waits(self, root: str) -> bool:
        return root in self._failed and time.monotonic() < self._failed[root]

    def _journal(self, root: str) -> Journal:
        if root not in self._journals:
            # one store may read two directories (of two hosts or users) with journals of this engine: names differ
            self._journals[root] = Journal(Path(root), f"{self._generation}.{secrets.token_hex(4)}")
        return self._journals[root]

    def _note(self, root: str, error: OSError | None) -> None:
        """Note that the journal under ``root`` could be written (None) or not, and log when that changes."""
        if error is None:
            if self._failed.pop(root, None) is not None:
                logger.warning("the journal in %s is written again", root)
            return
        if root not in self._failed:
            logger.error("no journal can be written in %s (%s); counts wait until it can", root, error.strerror)
        self._failed[root] = time.monotonic() + RETRY_SECONDS
