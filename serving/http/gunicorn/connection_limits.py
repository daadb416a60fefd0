"""A worker's places for connections: bounded, by address too, and the oldest that only waits makes room.

To hold a place without sending anything (Slowloris), or without reading (Slow Read), costs an attacker next to nothing.
So a full house is no reason to turn anyone away: the connection that has waited longest for its client goes, and an
address loses one of its own first.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any, Protocol


class Guest(Protocol):
    """A connection. ``waiting_since``: what it waits for from its client and when that began (monotonic seconds), the
    body of a request (1) being worth more than its head (0), and that an answer is taken (2) more than both; None while
    it waits for us."""

    address: str

    @property
    def waiting_since(self) -> tuple[int, float] | None: ...

    def evict(self) -> None: ...


class Places:
    """``total`` places, of which one address may take ``by_address``. ``left`` is called for each that is given up."""

    def __init__(self, total: int, by_address: int, left: Callable[[], None] = lambda: None) -> None:
        self.total, self.by_address = total, by_address
        self._left = left
        self._guests: dict[str, list[Guest]] = {}
        self._number = 0

    def __len__(self) -> int:
        return self._number

    @property
    def is_full(self) -> bool:
        """Whether there is no place, and nobody who would make one."""
        return self._number >= self.total and self._oldest(self._all()) is None

    def enter(self, guest: Guest) -> bool:
        """Whether there is a place for ``guest``, which it then has; another may have lost its own for it."""
        own = self._guests.get(guest.address, [])
        if len(own) >= self.by_address and not self._make_room(own):
            return False
        if self._number >= self.total and not self._make_room(self._all()):
            return False
        self._guests.setdefault(guest.address, []).append(guest)
        self._number += 1
        return True

    def leave(self, guest: Guest) -> None:
        """Give up its place. Harmless for one that has none any more."""
        own = self._guests.get(guest.address, [])
        if guest not in own:
            return
        own.remove(guest)
        if not own:
            del self._guests[guest.address]
        self._number -= 1
        self._left()

    def _all(self) -> list[Guest]:
        return [guest for own in self._guests.values() for guest in own]

    def _make_room(self, among: list[Guest]) -> bool:
        oldest = self._oldest(among)
        if oldest is None:
            return False
        self.leave(oldest)
        oldest.evict()
        return True

    @staticmethod
    def _oldest(guests: list[Guest]) -> Guest | None:
        waiting = [(since, guest) for guest in guests if (since := guest.waiting_since) is not None]
        return min(waiting, key=lambda pair: pair[0])[1] if waiting else None


def address_of(peer: Any) -> str:
    """Whom a connection counts for: an IPv4 address, the /64 of an IPv6 one, which a single host has to itself, or what
    is told of a Unix socket's peer."""
    if not isinstance(peer, tuple):
        return str(peer)
    try:
        found = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return str(peer[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)
