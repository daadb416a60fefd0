"""Connection limits for each worker and each address; at a limit, the connection idle for longest is evicted.

Holding a connection without sending anything (Slowloris), or without reading (Slow Read), costs an attacker almost
nothing. So a full worker refuses nobody while it can evict: it evicts the connection that has waited longest for its
client, and an address at its limit loses one of its own connections.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any, Protocol


class Limited(Protocol):
    """A connection that is counted.

    ``waiting_since`` is None while the connection waits for the server. Otherwise it is what the connection waits for
    (0: the head of a request, 1: its body, 2: the client reading the response), and since when (monotonic seconds). The
    connection with the lowest value is evicted first.
    """

    address: str

    @property
    def waiting_since(self) -> tuple[int, float] | None: ...

    def evict(self) -> None: ...


class ConnectionLimits:
    """A limit of at most ``total`` connections, and at most ``by_address`` of one address. ``on_release`` is called for
    each connection that is counted out."""

    def __init__(self, total: int, by_address: int, on_release: Callable[[], None] = lambda: None) -> None:
        self.total, self.by_address = total, by_address
        self._on_release = on_release
        self._connections: dict[str, list[Limited]] = {}
        self._number = 0

    def __len__(self) -> int:
        return self._number

    @property
    def is_full(self) -> bool:
        """Whether there is no free place and no connection that could be evicted."""
        return self._number >= self.total and self._oldest(self._all()) is None

    def admit(self, connection: Limited) -> bool:
        """Count ``connection`` in, evicting another one if needed. Return whether there was room."""
        own = self._connections.get(connection.address, [])
        if len(own) >= self.by_address and not self._make_room(own):
            return False
        if self._number >= self.total and not self._make_room(self._all()):
            return False
        self._connections.setdefault(connection.address, []).append(connection)
        self._number += 1
        return True

    def release(self, connection: Limited) -> None:
        """Count ``connection`` out. Does nothing if it is not counted any more."""
        own = self._connections.get(connection.address, [])
        if connection not in own:
            return
        own.remove(connection)
        if not own:
            del self._connections[connection.address]
        self._number -= 1
        self._on_release()

    def _all(self) -> list[Limited]:
        return [connection for own in self._connections.values() for connection in own]

    def _make_room(self, among: list[Limited]) -> bool:
        oldest = self._oldest(among)
        if oldest is None:
            return False
        self.release(oldest)
        oldest.evict()
        return True

    @staticmethod
    def _oldest(connections: list[Limited]) -> Limited | None:
        waiting = [(since, connection) for connection in connections if (since := connection.waiting_since) is not None]
        return min(waiting, key=lambda pair: pair[0])[1] if waiting else None


def address_of(peer: Any) -> str:
    """Return the name under which a connection is counted: an IPv4 address, the /64 network of an IPv6 address (one
    host usually has all of it), or the user of a Unix socket (``accepting.user_of``)."""
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
