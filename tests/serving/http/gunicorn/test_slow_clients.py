"""Slowloris protection: a head and a body have a deadline, which holds before anyone is asked for a key."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gunicorn.config import Config
from gunicorn.http import RequestParser
from instant_model import write_instant_model
from raw_requests import CHAT, GOOD, NEXT, post, sized
from server_calls import health, until
from serving_process import Running, running

from mlflow_llm.serving.frontend.worker_state import WorkerState
from mlflow_llm.serving.http.app import create_app
from mlflow_llm.serving.http.gunicorn import slowloris
from mlflow_llm.serving.http.gunicorn.parse_errors import NotedRequest
from mlflow_llm.serving.http.gunicorn.worker import DrainingWorker, JsonLogger

IO_TIMEOUT = 8.0
PAUSE = 3.0
CONNECTIONS = 24
OF_ONE = {"max_connections_per_address": CONNECTIONS}
HEAD = b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-A: "
CLOSING = b"a\r\nConnection: close\r\n\r\n"
Converse = Callable[..., bytes]


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=240)


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Client:
    """The server's end of a connection whose client sends ``parts``, ``pause`` seconds apart on ``clock``, and then
    nothing. ``answer`` is what it was sent.
    """

    family = socket.AF_INET

    def __init__(self, clock: Clock, parts: Iterable[bytes], pause: float) -> None:
        self._clock, self._parts, self._pause = clock, iter(parts), pause
        self._next_at, self._left = clock.now, b""
        self._timeout: float | None = None
        self._ours, self._theirs = socket.socketpair()  # for what asks the system about it
        self.answer = b""

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def recv(self, size: int, *_: int) -> bytes:
        if not self._left:
            self._left = next(self._parts, b"")
            if not self._left:
                self._next_at = float("inf")
            until = self._clock.now + (self._timeout or 0.0)
            if self._next_at > until:
                self._clock.now = until
                raise TimeoutError
            self._clock.now = max(self._clock.now, self._next_at)
            self._next_at = self._clock.now + self._pause
        data, self._left = self._left[:size], self._left[size:]
        return data

    def send(self, data: Any) -> int:
        self.answer += bytes(data)
        return len(data)

    def sendall(self, data: Any) -> None:
        self.send(data)

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of all connections."""
    clock = Clock()
    monkeypatch.setattr(slowloris, "monotonic", clock)
    return clock


@pytest.fixture
def converse(clock: Clock, make: Callable[..., WorkerState], monkeypatch: pytest.MonkeyPatch) -> Iterator[Converse]:
    """Return ``converse(*parts, pause=…, app=…)``, which gives a worker's answer to a client until it closes."""
    monkeypatch.setattr(RequestParser, "mesg_class", NotedRequest)
    config = Config()
    config.set("keepalive", 75)
    config.set("http_parser", "python")
    worker = DrainingWorker(1, 0, [], None, 300, config, JsonLogger(config))
    own = create_app(make(io_timeout=IO_TIMEOUT))

    def converse(*parts: bytes, pause: float = PAUSE, app: Any = own) -> bytes:
        worker.wsgi = app
        client = Client(clock, parts, pause)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            connection = slowloris.TimedConnection(client, IO_TIMEOUT, peer=("127.0.0.1", 1), address="127.0.0.1")
            worker.serve(listener, None, connection)
        return client.answer

    yield converse
    worker.tmp.close()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a server of one worker with 24 places for connections."""
    bundle = write_instant_model(tmp_path_factory.mktemp("full"))
    with running(bundle, io_timeout=240.0, max_connections=CONNECTIONS, **OF_ONE) as server:
        yield server


def test_slowloris_heads_are_evicted(full: Running) -> None:
    """With every place taken by an unfinished head (Slowloris) a new client is served: the oldest is evicted and the
    others stay.
    """
    until(lambda: health(full)["running"] == 0)
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nX-A: " % CHAT
    with contextlib.ExitStack() as held, ThreadPoolExecutor(1) as pool:
        oldest = held.enter_context(connect(full))
        oldest.sendall(head)
        health(full)  # the server has seen the oldest before the others
        others = [held.enter_context(connect(full)) for _ in range(CONNECTIONS - 1)]
        for other in others:
            other.sendall(head)
        assert pool.submit(health, full).result(240)["running"] == 0
        assert not oldest.recv(1)
        assert not select.select(others, [], [], 0)[0]
    assert "Traceback" not in full.log()


def test_a_head_that_stops(converse: Converse) -> None:
    """An unfinished head is a 408 however slowly it came; a connection without a byte is closed without an answer."""
    for parts in ([HEAD], [HEAD, *[b"a"] * 10]):
        head, _, body = converse(*parts).partition(b"\r\n\r\n")
        assert statuses(head) == [408]
        assert b"\r\nConnection: close\r\n" in head
        assert b"\r\nX-Request-Id: req-" in head
        assert json.loads(body)["message"] == "Request Timeout: the head did not arrive within 8 seconds"
    assert converse() == b""


def test_a_head_in_two_parts(converse: Converse) -> None:
    """A pause within a head below the limit is accepted."""
    assert statuses(converse(HEAD, CLOSING)) == [200]


def test_every_head_has_its_own_time(converse: Converse) -> None:
    """Heads of one connection that take longer than the limit together, with pauses between them, are all answered."""
    assert 3 * PAUSE > IO_TIMEOUT
    last = NEXT.replace(b"Host", b"Connection: close\r\nHost")
    assert statuses(converse(*[HEAD, b"a\r\n\r\n"] * 3, last)) == [200] * 4


def test_a_pipelined_head_has_its_own_time(converse: Converse) -> None:
    """A head whose beginning came with the request before it may pause as well."""
    assert statuses(converse(NEXT + HEAD, b"a\r\n\r\n" + HEAD, CLOSING)) == [200] * 3


def test_a_slow_body(converse: Converse) -> None:
    """A body in parts, announced or chunked, whose pauses stay within the limit is taken."""
    close, third = b"Connection: close\r\n", len(GOOD) // 3
    parts = GOOD[:third], GOOD[third : 2 * third], GOOD[2 * third :]
    head = post(b"Content-Length: %d\r\n" % len(GOOD) + close)
    assert statuses(converse(head + parts[0], parts[1], parts[2])) == [200]
    framed = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
    head = post(b"Transfer-Encoding: chunked\r\n" + close)
    assert statuses(converse(head + framed[0], framed[1], framed[2] + b"0\r\n\r\n")) == [200]


def test_a_body_that_pauses_longer_than_a_head_may(converse: Converse) -> None:
    """An upload that keeps sending is accepted even if it takes longer than the limit in all."""
    assert 4 * PAUSE > IO_TIMEOUT
    head = post(b"Connection: close\r\nContent-Length: %d\r\n" % (len(GOOD) + 4 * 4096))
    assert statuses(converse(head, *[b" " * 4096] * 4, GOOD)) == [200]


@pytest.mark.parametrize(
    ("framing", "piece"),
    [(b"Content-Length: 10000000\r\n", b" "), (b"Transfer-Encoding: chunked\r\n", b"1\r\n \r\n")],
    ids=["announced", "chunked"],
)
def test_a_body_that_drips(converse: Converse, framing: bytes, piece: bytes) -> None:
    """A body that comes byte by byte is a 408 in the dialect's form, and the connection ends."""
    head, _, body = converse(post(framing), *[piece] * 100, pause=0.3).partition(b"\r\n\r\n")
    assert statuses(head) == [408]
    assert b"\r\nConnection: close\r\n" in head
    reported = json.loads(body)["error"]
    assert reported["message"] == "the body arrives too slowly: more than 8 seconds behind 1024 bytes a second"
    assert (reported["type"], reported["param"]) == ("invalid_request_error", None)


class Scripted:
    """A socket whose next bytes come ``delay`` seconds after they are asked for, on a clock of its own."""

    def __init__(self, delay: float, size: int) -> None:
        self.now, self._delay, self._size, self._timeout = 0.0, delay, size, 0.0

    def settimeout(self, seconds: float) -> None:
        self._timeout = seconds

    def recv(self, _: int) -> bytes:
        self.now += min(self._delay, self._timeout)
        if self._delay > self._timeout:
            raise TimeoutError
        return b"x" * self._size


@pytest.mark.parametrize(
    ("delay", "size", "seconds"), [(20.0, 2**15, 10_000), (0.5, 600, 10_000), (29.0, 1, 30), (1.0, 512, 60)]
)
def test_deadline_of_a_slow_body(monkeypatch: pytest.MonkeyPatch, delay: float, size: int, seconds: float) -> None:
    """With a timeout of 30 s a body of more than 1 KiB/s goes on for hours, one of half of that ends after a minute,
    and one of single bytes with its second byte.
    """
    plain = Scripted(delay, size)
    monkeypatch.setattr(slowloris, "monotonic", lambda: plain.now)
    reading = slowloris.TimedConnection(plain, 30.0)
    reading.expect_body()
    with contextlib.suppress(slowloris.TooSlow):
        while plain.now < 10_000:
            reading.recv(8192)
    assert plain.now == pytest.approx(seconds, abs=20)


class Reading:
    """The socket of a client that takes ``size`` bytes ``delay`` seconds after they are sent, on a clock of its own."""

    def __init__(self, delay: float, size: int) -> None:
        self.now, self._delay, self._size = 0.0, delay, size
        self.connection: slowloris.TimedConnection | None = None
        self.seen: list[tuple[int, float] | None] = []

    def send(self, _: bytes) -> int:
        self.now += self._delay
        assert self.connection is not None
        self.seen.append(self.connection.waiting_since)
        return self._size


@pytest.mark.parametrize(
    ("delay", "size", "waits_since"), [(0.5, 600, None), (10.0, 65536, 90.0), (0.5, 1, 0.0), (20.0, 1, 0.0)]
)
def test_a_slow_reader_counts_as_waiting(
    monkeypatch: pytest.MonkeyPatch, delay: float, size: int, waits_since: float | None
) -> None:
    """A client reading 1 KiB/s is not held to be stalled; one that stopped is from its last read, and one reading
    single bytes (Slow Read) from its first.
    """
    plain = Reading(delay, size)
    monkeypatch.setattr(slowloris, "monotonic", lambda: plain.now)
    plain.connection = slowloris.TimedConnection(plain, 30.0)
    for _ in range(10):
        assert plain.connection.send(bytes(65536)) == size
        assert plain.connection.waiting_since is None
    found = plain.seen[-1]
    assert found == (None if waits_since is None else (2, pytest.approx(waits_since, abs=0.1)))


def test_a_lingering_connection_may_be_evicted() -> None:
    """A connection that only lingers for a refused client's close may be evicted like an idle one."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = slowloris.TimedConnection(ours, 30.0)
        connection.expect_body()
        with connection.leaving():
            assert connection.waiting_since is not None
            assert connection.waiting_since[0] == 0
        assert connection.waiting_since is None


def test_no_request_after_an_unread_body_that_stops(converse: Converse) -> None:
    """After an unneeded body that broke off the connection ends, and no request is read within the body."""
    broken = post(b"Content-Length: 100\r\n", b"x" * 20, b"/v1/nothing")
    assert statuses(converse(broken, NEXT, pause=1.5 * IO_TIMEOUT)) == [404, 408]


class Slow:
    """An application that gives its reply in pieces, ``PAUSE`` apart, which take longer than a head and a body may."""

    pieces = 4

    def __init__(self, clock: Clock, like: Any) -> None:
        self._clock, self.extensions = clock, like.extensions

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
        environ["wsgi.input"].read(2**20)
        start_response("200 OK", [("Content-Length", str(self.pieces))])
        for _ in range(self.pieces):
            self._clock.now += PAUSE
            yield b"x"


def test_a_reply_may_take_longer(converse: Converse, clock: Clock, server: WorkerState) -> None:
    """A reply that takes longer than a head and a body may is complete."""
    slow = Slow(clock, create_app(server))
    assert slow.pieces * PAUSE > IO_TIMEOUT
    answer = converse(sized(GOOD, more=b"Connection: close\r\n"), app=slow)
    assert statuses(answer) == [200]
    assert answer.endswith(b"\r\n\r\n" + b"x" * slow.pieces)


def test_a_long_reply_costs_the_next_head_no_time(converse: Converse, clock: Clock, server: WorkerState) -> None:
    """The time that a reply takes does not count for the next head."""
    slow = Slow(clock, create_app(server))
    answer = converse(sized(GOOD) + HEAD, CLOSING, app=slow, pause=slow.pieces * PAUSE + PAUSE)
    assert statuses(answer) == [200, 200]
