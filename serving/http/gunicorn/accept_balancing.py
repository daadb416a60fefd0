"""Accept balancing: the worker with the fewest connections takes the next one.

Workers share one listening socket, and the kernel wakes all of them for a connection (the thundering herd). A worker
that is already awake takes it, and the next one of a burst too. ``SO_REUSEPORT`` would distribute connections by a hash
of addresses, does not support Unix sockets, and resets the connections in the queue of a worker that ends. So a worker
looks at the connection counts of the others before it accepts.

The table of connection counts is shared memory, mapped by the arbiter before it forks. Only the worker itself writes to
its slot, in aligned words.
"""

from __future__ import annotations

import mmap
import time

CLOSED = -1  # the count of a slot that takes no connections: without a worker, or its worker is starting or draining
HUNG_SECONDS = 1.0  # seconds without an accept after which a worker whose turn it is counts as hung
_SLOT_WORDS = 2  # words of a slot: current connections, and how many were accepted so far


class AcceptBalancer:
    """The arbiter's side: assigns each worker a slot of the table, and clears it when the worker has ended."""

    def __init__(self, workers: int) -> None:
        slots = 2 * workers  # a worker may still be draining when its successor starts
        self.words = memoryview(mmap.mmap(-1, slots * _SLOT_WORDS * 4)).cast("i")
        self._given: set[int] = set()
        for slot in range(slots):
            self._clear(slot)

    def assign(self) -> WorkerSlot:
        slot = next(slot for slot in range(len(self.words) // _SLOT_WORDS) if slot not in self._given)
        self._given.add(slot)
        return WorkerSlot(self.words, slot)

    @property
    def num_open(self) -> int:
        """The number of workers that take connections."""
        return sum(count != CLOSED for count in self.words[::_SLOT_WORDS])

    def reclaim(self, slot: WorkerSlot) -> None:
        self._clear(slot.number)
        self._given.discard(slot.number)

    def _clear(self, slot: int) -> None:
        self.words[slot * _SLOT_WORDS], self.words[slot * _SLOT_WORDS + 1] = CLOSED, 0


class WorkerSlot:
    """A worker's slot of the table, and its view of the other workers' slots."""

    def __init__(self, words: memoryview[int], number: int) -> None:
        self.number = number
        self._words, self._index = words, number * _SLOT_WORDS
        self.connections = 0
        self._open = False
        self._ahead: dict[int, tuple[int, int]] = {}
        self._since = 0.0
        self._hung: dict[int, tuple[int, int]] = {}

    def open(self) -> None:
        """Take part in the balancing: from now on other workers leave connections to this one."""
        self._open = True
        self._publish()

    def close(self) -> None:
        """Leave the balancing: this worker then takes a connection only if no other worker is open."""
        self._open = False
        self._publish()

    def add(self) -> None:
        """Count a connection in."""
        self.connections += 1
        self._words[self._index + 1] = (self._words[self._index + 1] + 1) & 0x7FFFFFFF
        self._publish()

    def remove(self) -> None:
        """Count a connection out."""
        self.connections -= 1
        self._publish()

    def _publish(self) -> None:
        self._words[self._index] = self.connections if self._open else CLOSED

    def take_turn(self, now: float | None = None) -> bool:
        """Return whether this worker may accept the waiting connection.

        It may unless this worker has over a quarter more connections than another open one. A worker that has fewer
        connections but accepts none for ``HUNG_SECONDS`` seconds is skipped until its counts change.
        """
        others = self._others()
        self._hung = {slot: state for slot, state in self._hung.items() if others.get(slot) == state}
        ahead = {slot: state for slot, state in others.items() if slot not in self._hung and self._is_after(state[0])}
        if not ahead:
            self._ahead = {}
            return True
        now = time.monotonic() if now is None else now
        if ahead != self._ahead:
            self._ahead, self._since = ahead, now
        if now - self._since < HUNG_SECONDS:
            return False
        self._hung |= ahead
        self._ahead = {}
        return True

    def _is_after(self, connections: int) -> bool:
        return not self._open or self.connections > connections + connections // 4

    def _others(self) -> dict[int, tuple[int, int]]:
        """Return (connections, accepted) of each open slot except this one."""
        words = self._words.tolist()
        states = (
            (i // _SLOT_WORDS, (words[i], words[i + 1]))
            for i in range(0, len(words), _SLOT_WORDS)
            if words[i] != CLOSED
        )
        return {slot: state for slot, state in states if slot != self.number}
