"""Write back-pressure: what the kernel keeps for a client that reads nothing, counted in bytes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import gevent
import gevent.socket
import pytest

from mlflow_llm.serving.http.gunicorn.slowloris import TimedConnection
from mlflow_llm.serving.http.gunicorn.write_backpressure import UNSENT_BYTES, BackpressureSocket, limit_unsent

SIZE = 4 * 2**20
ROOM = 64 * 2**10


@pytest.fixture(params=["tcp", "unix"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a server's connection, and its client's with a small buffer."""
    with ExitStack() as held:
        if request.param == "unix":
            ours, theirs = socket.socketpair()
        else:
            listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
            theirs = socket.socket()
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM)
            theirs.connect(listener.getsockname())
            ours = listener.accept()[0]
        yield held.enter_context(ours), held.enter_context(theirs)


def taken(ours: socket.socket) -> int:
    """Return how many bytes the kernel takes at once for a client that reads nothing."""
    ours.setblocking(False)
    sent = 0
    while sent < SIZE:
        try:
            sent += ours.send(bytes(250))
        except BlockingIOError:
            break
    return sent


def test_unsent_bytes_stay_below_the_watermark(ends: tuple[socket.socket, socket.socket]) -> None:
    """The kernel buffers only a few hundred tokens' bytes beyond the client's buffer, not megabytes by default."""
    limit_unsent(ends[0], 30.0)
    assert 0 < taken(ends[0]) <= 2 * ROOM + 4 * UNSENT_BYTES


def test_a_reader_that_takes_nothing_times_out(ends: tuple[socket.socket, socket.socket]) -> None:
    """A reader that takes nothing raises ``TimeoutError``, and what was sent arrives in order."""
    ours, theirs = ends
    limit_unsent(ours, 30.0)
    ours.settimeout(0.05)
    with pytest.raises(TimeoutError):
        BackpressureSocket(ours, ours.send).sendall(bytes(range(250)) * (SIZE // 250))
    theirs.settimeout(30.0)
    assert theirs.recv(250, socket.MSG_WAITALL) == bytes(range(250))


def test_megabytes_arrive_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    """Megabytes arrive whole, piece by piece."""
    ours, theirs = ends
    limit_unsent(ours, 30.0)
    ours.settimeout(30.0)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(theirs.recv, SIZE, socket.MSG_WAITALL)
        BackpressureSocket(ours, ours.send).sendall(bytes(SIZE))
        assert len(reading.result()) == SIZE


def test_what_is_sent_at_once_never_waits() -> None:
    """A send without waiting fills the kernel's buffer in order; a closed reader raises when waited for."""
    ours, theirs = gevent.socket.socketpair()
    with theirs, ours:
        connection = TimedConnection(ours, 30.0)
        answer = BackpressureSocket(ours, connection.send, connection.send_now)
        appended = 0
        while answer.send_pending():
            answer.append(b"%08d" % appended)
            appended += 1
        reading = gevent.spawn(lambda: b"".join(iter(lambda: theirs.recv(65536), b"")))
        answer.flush()
        ours.shutdown(socket.SHUT_WR)
        assert reading.get(timeout=30) == b"".join(b"8\r\n%08d\r\n" % i for i in range(appended))
        theirs.close()
        answer.append(b"more")
        assert not answer.send_pending()
        with pytest.raises(OSError, match="Broken pipe"):
            answer.flush()


def test_a_timeout_beyond_the_kernels_longest() -> None:
    """A write timeout of a year is clamped to the kernel's maximum."""
    with socket.socket() as one:
        limit_unsent(one, 365 * 86400.0)
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2**31 - 1
