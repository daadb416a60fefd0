"""Answers to requests that the parser refuses, in bytes over a socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from gunicorn.config import Config
from gunicorn.http import RequestParser
from gunicorn.http.errors import ParseException

from mlflow_llm.serving.http.gunicorn import parse_errors
from mlflow_llm.serving.http.gunicorn.slowloris import TimedConnection
from mlflow_llm.serving.http.wire.bodies import TooSlow


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TimedConnection, socket.socket]]:
    """Yield a server's connection, parsed as in a worker, and its client's end."""
    monkeypatch.setattr(RequestParser, "mesg_class", RequestParser.mesg_class)
    parse_errors.install()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield TimedConnection(ours, 30.0), theirs


def refused(ends: tuple[TimedConnection, socket.socket], head: bytes) -> bytes:
    """Return the answer that a client gets for ``head``, which the parser refuses."""
    connection, client = ends
    client.sendall(head)
    config = Config()
    config.set("limit_request_line", 8190)
    config.set("limit_request_fields", 5)
    with pytest.raises(ParseException) as caught:
        next(RequestParser(config, connection, ("127.0.0.1", 1)))
    assert parse_errors.refuse(connection.plain, caught.value, "127.0.0.1", connection.request)
    return client.recv(65536)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\nHost: a\r\nbad header\r\n\r\n", b"400 Bad Request"),
        (b"GET /v1/models HTTP/1.1\r\n" + b"X: 1\r\n" * 6 + b"\r\n", b"431 Request Header Fields Too Large"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nExpect: tea\r\n\r\n", b"417 Expectation Failed"),
    ],
)
def test_the_dialect_of_the_path(ends: tuple[TimedConnection, socket.socket], head: bytes, status: bytes) -> None:
    """A head that is refused after its first line is answered in the form of its path's dialect."""
    answer = refused(ends, head)
    assert answer.startswith(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\n")
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert body["error"]["message"].startswith(status.decode()[4:])


def test_a_first_line_that_is_too_long(ends: tuple[TimedConnection, socket.socket]) -> None:
    """An overlong request line is answered in MLflow's form, since its path is unknown."""
    answer = refused(ends, b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 414 URI Too Long\r\n")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error_code"] == "BAD_REQUEST"


def test_the_callers_id_is_kept(ends: tuple[TimedConnection, socket.socket]) -> None:
    """A request that is refused once its head was parsed has the caller's id in its answer."""
    connection, client = ends
    client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Request-Id: mine-1\r\n\r\n")
    request = next(RequestParser(Config(), connection, ("127.0.0.1", 1)))
    assert connection.request is request
    assert parse_errors.refuse(connection.plain, TooSlow("slow"), "127.0.0.1", connection.request)
    answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"X-Request-Id: mine-1\r\n" in answer


def test_other_errors_are_not_answered(ends: tuple[TimedConnection, socket.socket]) -> None:
    """An error that is not the request's fault is left to the worker."""
    assert not parse_errors.refuse(ends[0].plain, ValueError("ours"))


def test_a_client_that_speaks_tls_is_told_at_once(ends: tuple[TimedConnection, socket.socket]) -> None:
    """The first bytes of a TLS handshake, which have no end of line, are answered with what to change."""
    answer = refused(ends, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(11, 64)))
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    said = json.loads(answer.partition(b"\r\n\r\n")[2])["message"]
    assert "the client speaks TLS (https://), and this server plain HTTP" in said
    assert "--tls-cert" in said
