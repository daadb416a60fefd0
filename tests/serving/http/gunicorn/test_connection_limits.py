"""Connection limits: who is admitted and who is evicted when a worker is full."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from mlflow_llm.serving.http.gunicorn.connection_limits import ConnectionLimits, address_of
from mlflow_llm.serving.http.gunicorn.slowloris import TimedConnection
from mlflow_llm.serving.http.wire.keep_alive import RequestBody, address_in


class Limited:
    """A connection that has waited for its client since ``since``; None: it is being answered."""

    def __init__(self, address: str, since: float | None, *, body: bool = False) -> None:
        self.address, self.since, self.body = address, since, body
        self.evicted = False

    @property
    def waiting_since(self) -> tuple[int, float] | None:
        return None if self.since is None else (int(self.body), self.since)

    def evict(self) -> None:
        self.evicted = True


def connections(*since: float | None, address: str = "a") -> list[Limited]:
    return [Limited(address, one) for one in since]


def test_a_full_worker_evicts_the_longest_idle() -> None:
    """A full worker evicts the connection that has waited longest for its client; those receiving bodies go last."""
    limits = ConnectionLimits(3, 3)
    young, old, body = Limited("a", 5.0), Limited("b", 2.0), Limited("c", 1.0, body=True)
    for connection in (young, old, body):
        assert limits.admit(connection)
    for evicted in (old, young, body):
        assert limits.admit(Limited("d", None))
        assert evicted.evicted
        assert len(limits) == 3
    assert limits.is_full
    assert not limits.admit(Limited("e", None))


def test_an_address_at_its_limit_evicts_its_own() -> None:
    """An address at its limit evicts a connection of its own, even if others have waited longer."""
    limits = ConnectionLimits(10, 2)
    other = Limited("b", 0.0)
    mine = connections(1.0, 2.0, 3.0)
    for connection in (other, *mine):
        assert limits.admit(connection)
    assert [connection.evicted for connection in (other, *mine)] == [False, True, False, False]


def test_an_address_at_its_limit_of_busy_connections_is_refused() -> None:
    """An address whose connections are all busy at its limit gets no more, but others do."""
    limits = ConnectionLimits(10, 2)
    for connection in connections(None, None):
        assert limits.admit(connection)
    assert not limits.admit(Limited("a", None))
    assert limits.admit(Limited("b", None))


def test_a_connection_is_released_once() -> None:
    """Closing a connection frees its place once and is reported once, also after an eviction."""
    left: list[int] = []
    limits = ConnectionLimits(1, 1, on_release=lambda: left.append(1))
    first, second = connections(1.0, 2.0)
    assert limits.admit(first)
    assert limits.admit(second)
    limits.release(first)
    limits.release(second)
    limits.release(second)
    assert (len(limits), len(left)) == (0, 2)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("::ffff:10.0.0.1", 5, 0, 0), "10.0.0.1"),
        (("2001:db8:0:1:aaaa::1", 5, 0, 0), "2001:db8:0:1::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        (("name", 5), "name"),
        ("", ""),
    ],
)
def test_addresses_that_count_as_one(peer: object, address: str) -> None:
    """IPv4 addresses count alone, IPv6 ones by the network that a single host has to itself."""
    assert address_of(peer) == address


@pytest.mark.parametrize(("peer", "address"), [(("2001:db8::1", 5, 0, 0), "2001:db8::/64"), ("", "user 1000")])
def test_a_request_counts_for_whom_its_connection_does(peer: object, address: str) -> None:
    """Limits count an IPv6 host with all its addresses as one caller, and so each user of a Unix socket."""
    stream = SimpleNamespace(reader=io.BytesIO())
    connection = TimedConnection(None, 30.0, peer=peer, address=address)
    body = RequestBody(SimpleNamespace(body=stream, headers=[]), connection)
    assert address_in({"wsgi.input": body, "REMOTE_ADDR": "2001:db8::1"}) == address
