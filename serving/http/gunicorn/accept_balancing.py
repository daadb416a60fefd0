"""How many connections each worker has, for all of them to see: the next one is for whoever has the fewest.

Workers share one listening socket, and the kernel wakes all of them for a connection; whichever is awake already takes
it, and of a burst the next one, too. (``SO_REUSEPORT`` would deal by a hash of addresses, know no Unix sockets, and
leave what waits for a worker that ends without an answer.) So a worker looks at the others first.

The table is memory that the arbiter makes before it forks. A worker alone writes its slot, in aligned words.
"""

from __future__ import annotations

import mmap
import time

CLOSED = -1  # a worker that does not take connections: none there, starting, draining
PATIENCE = 1.0  # seconds in which a worker whose turn it is takes no connection until others do without it
_WIDTH = 2  # words of a slot: connections, and how many were accepted so far


class Shares:
    """The arbiter's: gives each worker its slot, and clears it when the worker has ended."""

    def __init__(self, workers: int) -> None:
        slots = 2 * workers  # a worker may still drain when its successor begins
        self.words = memoryview(mmap.mmap(-1, slots * _WIDTH * 4)).cast("i")
        self._given: set[int] = set()
        for slot in range(slots):
            self._clear(slot)

    def give(self) -> Share:
        slot = next(slot for slot in range(len(self.words) // _WIDTH) if slot not in self._given)
        self._given.add(slot)
        return Share(self.words, slot)

    def take_back(self, share: Share) -> None:
        self._clear(share.slot)
        self._given.discard(share.slot)

    def _clear(self, slot: int) -> None:
        self.words[slot * _WIDTH], self.words[slot * _WIDTH + 1] = CLOSED, 0


class Share:
    """A worker's slot, and its view of the others'."""

    def __init__(self, words: memoryview[int], slot: int) -> None:
        self.slot = slot
        self._words, self._place = words, slot * _WIDTH
        self._number = 0
        self._open = False
        self._ahead: dict[int, tuple[int, int]] = {}
        self._since = 0.0
        self._stuck: dict[int, tuple[int, int]] = {}

    def open(self) -> None:
        """From now on others leave connections to this worker."""
        self._open = True
        self._tell()

    def close(self) -> None:
        """Others leave it none any more; it takes them where there is nobody else."""
        self._open = False
        self._tell()

    def add(self) -> None:
        self._number += 1
        self._words[self._place + 1] = (self._words[self._place + 1] + 1) & 0x7FFFFFFF
        self._tell()

    def remove(self) -> None:
        self._number -= 1
        self._tell()

    def _tell(self) -> None:
        self._words[self._place] = self._number if self._open else CLOSED

    def is_due(self, now: float | None = None) -> bool:
        """Whether this worker should take the connection that waits: none has fewer, by more than a quarter.

        A worker that has fewer and takes none for ``PATIENCE`` hangs, and counts again once it moves.
        """
        others = self._others()
        self._stuck = {slot: state for slot, state in self._stuck.items() if others.get(slot) == state}
        ahead = {slot: state for slot, state in others.items() if slot not in self._stuck and self._is_after(state[0])}
        if not ahead:
            self._ahead = {}
            return True
        now = time.monotonic() if now is None else now
        if ahead != self._ahead:
            self._ahead, self._since = ahead, now
        if now - self._since < PATIENCE:
            return False
        self._stuck |= ahead
        self._ahead = {}
        return True

    def _is_after(self, connections: int) -> bool:
        return not self._open or self._number > connections + connections // 4

    def _others(self) -> dict[int, tuple[int, int]]:
        """The open slots but this one: connections, accepted."""
        words = self._words.tolist()
        states = ((i // _WIDTH, (words[i], words[i + 1])) for i in range(0, len(words), _WIDTH) if words[i] != CLOSED)
        return {slot: state for slot, state in states if slot != self.slot}
