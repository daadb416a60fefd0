"""Slowloris protection: a head and a body have a deadline, which holds before anyone is asked for a key."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from instant_model import write_instant_model
from raw_requests import CHAT, GOOD, NEXT, post, sized
from server_calls import BODY, ask, asking, health, until
from serving_process import Running, running

from mlflow_llm.serving.http.gunicorn import slowloris

IO_TIMEOUT = 8.0
PAUSE = 3.0  # well below the limit: a busy machine makes it longer
CONNECTIONS = 24
OF_ONE = {"max_connections_per_address": CONNECTIONS}
LONG = BODY | {"max_tokens": 450}  # nine seconds
HEAD = b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-A: "


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One worker with 24 places for connections, each of which has 8 s; 20 ms a step."""
    bundle = write_instant_model(tmp_path_factory.mktemp("impatient"), step_delay=0.02)
    with running(bundle, io_timeout=IO_TIMEOUT, max_connections=CONNECTIONS, **OF_ONE) as server:
        yield server


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=240)


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def drip(callers: list[socket.socket], byte: bytes) -> list[bytes]:
    """Send ``byte`` to each caller again and again until it is answered, and for a minute at most; the answers."""
    end, answers = time.monotonic() + 240, dict.fromkeys(callers, b"")
    waiting = set(callers)
    while waiting and time.monotonic() < end:
        for caller in select.select(list(waiting), [], [], 0.3)[0]:
            with contextlib.suppress(ConnectionResetError):
                while part := caller.recv(65536):
                    answers[caller] += part
            waiting.discard(caller)
        for caller in waiting:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # reported by the next recv
                caller.sendall(byte)
    return list(answers.values())


def converse(server: Running, *parts: bytes, pause: float = PAUSE) -> list[int]:
    """The statuses of all answers to ``parts``, each sent a pause after the one before, until the server closes."""
    with connect(server) as caller:
        for number, part in enumerate(parts):
            time.sleep(pause if number else 0)
            caller.sendall(part)
        answer = b""
        while more := caller.recv(65536):
            answer += more
    return statuses(answer)


def slow_body(server: Running) -> tuple[list[int], list[int]]:
    close, third = b"Connection: close\r\n", len(GOOD) // 3
    parts = GOOD[:third], GOOD[third : 2 * third], GOOD[2 * third :]
    head = post(b"Content-Length: %d\r\n" % len(GOOD) + close)
    announced = converse(server, head + parts[0], parts[1], parts[2], pause=PAUSE / 2)
    framed = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
    head = post(b"Transfer-Encoding: chunked\r\n" + close)
    return announced, converse(server, head + framed[0], framed[1], framed[2] + b"0\r\n\r\n", pause=PAUSE / 2)


def dripping_body(server: Running, headers: bytes, byte: bytes) -> bytes:
    with connect(server) as caller:
        caller.sendall(post(headers))
        return drip([caller], byte)[0]


def unread_body(server: Running) -> list[int]:
    with connect(server) as caller:
        caller.sendall(post(b"Content-Length: 100\r\n", b"x" * 20, b"/v1/nothing"))
        answer = caller.recv(65536)
        time.sleep(1.5 * IO_TIMEOUT)
        caller.sendall(NEXT)
        while part := caller.recv(65536):
            answer += part
    return statuses(answer)


def long_stream(server: Running) -> tuple[float, bytes]:
    began = time.monotonic()
    with asking(server, LONG | {"stream": True}) as answer:
        text = answer.read()
    return time.monotonic() - began, text


@pytest.fixture(scope="module")
def conversations(impatient: Running) -> dict[str, Any]:
    """What came of clients that wait most of the time, and so all at once."""
    closing = b"a\r\nConnection: close\r\n\r\n"
    large = post(b"Connection: close\r\nContent-Length: %d\r\n" % (len(GOOD) + 4 * 4096))
    long_reply = sized(json.dumps(LONG).encode())
    kinds: dict[str, Callable[[], Any]] = {
        "a head that stops": lambda: converse(impatient, HEAD),
        "nothing": lambda: converse(impatient),
        "a head in two parts": lambda: converse(impatient, HEAD, closing),
        "heads": lambda: converse(
            impatient, *[HEAD, b"a\r\n\r\n"] * 3, NEXT.replace(b"Host", b"Connection: close\r\nHost")
        ),
        "pipelined heads": lambda: converse(impatient, NEXT + HEAD, b"a\r\n\r\n" + HEAD, closing),
        "slow bodies": lambda: slow_body(impatient),
        "a large body": lambda: converse(impatient, large, *[b" " * 4096] * 4, GOOD),
        "announced": lambda: dripping_body(impatient, b"Content-Length: 10000000\r\n", b" "),
        "chunked": lambda: dripping_body(impatient, b"Transfer-Encoding: chunked\r\n", b"1\r\n \r\n"),
        "an unread body": lambda: unread_body(impatient),
        "a long stream": lambda: long_stream(impatient),
        "a long reply": lambda: ask(impatient, LONG),
        "a head behind a long reply": lambda: converse(impatient, long_reply + HEAD, closing),
    }
    with ThreadPoolExecutor(len(kinds)) as pool:
        running = {kind: pool.submit(talk) for kind, talk in kinds.items()}
    return {kind: future.result() for kind, future in running.items()}


def test_slowloris_heads_are_evicted(impatient: Running) -> None:
    """With every place taken by a head that comes byte by byte (Slowloris), another is served: the oldest makes room,
    and the others get their 408."""
    until(lambda: health(impatient)["running"] == 0)
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nX-A: " % CHAT
    with contextlib.ExitStack() as held, ThreadPoolExecutor(1) as pool:
        oldest = held.enter_context(connect(impatient))
        oldest.sendall(head)
        health(impatient)  # the server has seen the oldest before the others
        callers = [oldest, *(held.enter_context(connect(impatient)) for _ in range(CONNECTIONS - 1))]
        for caller in callers[1:]:
            caller.sendall(head)
        other = pool.submit(health, impatient)
        answers = drip(callers, b"a")
        assert other.result(240)["running"] == 0
    assert not answers[0]
    for answer in answers[1:]:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert statuses(head) == [408]
        assert b"\r\nConnection: close\r\n" in head
        assert b"\r\nX-Request-Id: req-" in head
        assert json.loads(body)["error"]["message"] == "Request Timeout: the head did not arrive within 8 seconds"
    assert "Traceback" not in impatient.log()


def test_a_head_that_stops(conversations: dict[str, Any]) -> None:
    """The beginning of a head with nothing behind it is a 408 too; a connection without a byte is closed as it is."""
    assert conversations["a head that stops"] == [408]
    assert conversations["nothing"] == []


def test_a_head_in_two_parts(conversations: dict[str, Any]) -> None:
    """A pause within a head, below the limit, is none of our business."""
    assert conversations["a head in two parts"] == [200]


def test_every_head_has_its_own_time(conversations: dict[str, Any]) -> None:
    """Heads of one connection that take longer than the limit together, with pauses between them, are all answered."""
    assert 3 * PAUSE > IO_TIMEOUT
    assert conversations["heads"] == [200] * 4


def test_a_pipelined_head_has_its_own_time(conversations: dict[str, Any]) -> None:
    """A head whose beginning came with the request before it may pause as well."""
    assert conversations["pipelined heads"] == [200] * 3


def test_a_slow_body(conversations: dict[str, Any]) -> None:
    """A body in parts, announced or chunked, whose pauses stay within the limit is taken."""
    assert conversations["slow bodies"] == ([200], [200])


def test_a_body_that_pauses_longer_than_a_head_may(conversations: dict[str, Any]) -> None:
    """What arrives pays for pauses: an upload that takes longer than the limit in all is taken."""
    assert 4 * PAUSE > IO_TIMEOUT
    assert conversations["a large body"] == [200]


@pytest.mark.parametrize("framing", ["announced", "chunked"])
def test_a_body_that_drips(conversations: dict[str, Any], framing: str) -> None:
    """A body that comes byte by byte is a 408 in the dialect's form, and the connection ends."""
    head, _, body = conversations[framing].partition(b"\r\n\r\n")
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
    """With 30 s to wait, a body of more than 1 KiB a second goes on for hours, however it pauses; one of half of that
    ends after a minute, one of a byte now and then with its second byte."""
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
    """Who takes an answer at 1 KiB a second waits for us; who stopped is waited for since then, and who takes a byte
    now and then (Slow Read) since the first."""
    plain = Reading(delay, size)
    monkeypatch.setattr(slowloris, "monotonic", lambda: plain.now)
    plain.connection = slowloris.TimedConnection(plain, 30.0)
    for _ in range(10):
        assert plain.connection.send(bytes(65536)) == size
        assert plain.connection.waiting_since is None
    found = plain.seen[-1]
    assert found == (None if waits_since is None else (2, pytest.approx(waits_since, abs=0.1)))


def test_a_lingering_connection_may_be_evicted() -> None:
    """While it is only waited for that a refused client closes, its place is worth as little as an idle one's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = slowloris.TimedConnection(ours, 30.0)
        connection.expect_body()
        with connection.leaving():
            assert connection.waiting_since is not None
            assert connection.waiting_since[0] == 0
        assert connection.waiting_since is None


def test_no_request_after_an_unread_body_that_stops(conversations: dict[str, Any]) -> None:
    """A body that was not needed and broke off leaves the connection's end, not a place for a request within it."""
    assert conversations["an unread body"] == [404, 408]


def test_a_reply_may_take_longer(conversations: dict[str, Any]) -> None:
    """A streamed reply and a whole one that take longer than a head and a body may are complete."""
    took, streamed = conversations["a long stream"]
    assert took > IO_TIMEOUT
    assert streamed.endswith(b"data: [DONE]\n\n")
    assert json.loads(conversations["a long reply"][1])["usage"]["completion_tokens"] == LONG["max_tokens"]


def test_a_long_reply_costs_the_next_head_no_time(conversations: dict[str, Any]) -> None:
    """Time that a reply takes is none of the next head's."""
    assert conversations["a head behind a long reply"] == [200, 200]
