"""Bytes that are no request, or none that a server should take: always a 4xx, never a trace of the code."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest
from server_calls import BODY, ask, until
from serving_process import Running

from mlflow_llm.serving.control.settings import ServerSettings

PATH = "/v1/chat/completions"
GOOD = json.dumps(BODY).encode()
TREE = b"Traceback", b'File "', b".py", b"site-packages"


def raw(server: Running, data: bytes) -> tuple[int, bytes, bytes]:
    """Send ``data`` as it is and return status, headers and body of the answer, after which the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=240) as caller:
        with contextlib.suppress(ConnectionError):  # the server may have closed already
            caller.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # the server closed without reading everything
            while part := caller.recv(65536):
                answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head, body


def request(headers: bytes = b"", body: bytes = b"", *, line: bytes = b"POST " + PATH.encode() + b" HTTP/1.1") -> bytes:
    always = b"Host: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return line + b"\r\n" + always + headers + b"\r\n" + body


def sized(body: bytes) -> bytes:
    return request(b"Content-Length: %d\r\n" % len(body), body)


def chunked(*chunks: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return request(b"Transfer-Encoding: chunked\r\n", framed + b"0\r\n\r\n")


CHUNKED = b"Transfer-Encoding: chunked\r\n"
LINES = {
    "no words of HTTP": (b"NONSENSE\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n", 400),
    "an unknown version": (request(line=b"GET / HTTP/9.9"), 400),
    "a long line": (request(line=b"GET /" + b"a" * 10_000 + b" HTTP/1.1"), 414),
    "a path that is no text": (request(line=b"GET /\xff\xfe HTTP/1.1"), 404),
    "a NUL in the query": (request(line=b"GET /version?a=\x00b HTTP/1.1"), 400),
    "an escaped NUL in the query": (request(line=b"GET /api/2.0/usage?tenant=a%00b HTTP/1.1"), 400),
    "an escaped NUL in the path": (request(line=b"GET /endpoints/a%00b HTTP/1.1"), 400),
    "a LF in the target": (request(line=b"GET /version?a=\nb HTTP/1.1"), 400),
    "an escape of nothing": (request(line=b"GET /version?a=%zz HTTP/1.1"), 400),
    "a fragment": (request(line=b"GET /version#a HTTP/1.1"), 400),
    "another host's target": (request(line=b"GET http://evil.example/version HTTP/1.1"), 400),
    "no host": (b"GET /version HTTP/1.1\r\nConnection: close\r\n\r\n", 400),
    "an empty host": (b"GET /version HTTP/1.1\r\nHost:\r\n\r\n", 400),
    "a host that is none": (b"GET /version HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
    "a host with a path": (b"GET /version HTTP/1.1\r\nHost: localhost/x\r\n\r\n", 400),
    "two hosts": (b"GET /version HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
    "PROXY": (b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n" + request(), 400),
}
HEADERS = {
    "a long header": (request(b"X-A: " + b"a" * 20_000 + b"\r\n"), 431),
    "a header of 1 MB": (request(b"X-A: " + b"a" * 10**6 + b"\r\n"), 431),
    "many headers": (request(b"".join(b"X-%d: a\r\n" % i for i in range(200))), 431),
    "a header without colon": (request(b"no colon\r\n"), 400),
    "a NUL": (request(b"X-A: a\x00b\r\n"), 400),
    "an expectation": (request(b"Expect: banana\r\n"), 417),
    "a length that is no number": (request(b"Content-Length: abc\r\n", GOOD), 400),
    "a negative length": (request(b"Content-Length: -1\r\n", GOOD), 400),
    "two lengths": (request(b"Content-Length: 3\r\nContent-Length: 4\r\n", b"abcd"), 400),
    "a length of 30 digits": (request(b"Content-Length: " + b"9" * 30 + b"\r\n", GOOD), 413),
    "a length over the limit": (request(b"Content-Length: 100000000\r\n", b"x" * 1000), 413),
    "length and chunks": (request(b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", b"0\r\n\r\n"), 400),
    "no coding": (request(b"Transfer-Encoding: identity\r\nContent-Length: %d\r\n" % len(GOOD), GOOD), 400),
    "no coding alone": (request(b"Transfer-Encoding: identity\r\n"), 400),
    "a compressed coding": (request(b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n"), 400),
    "two codings": (request(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"), 400),
    "a coding with a parameter": (request(b"Transfer-Encoding: chunked;a=b\r\n", b"0\r\n\r\n"), 400),
    "an unknown coding": (request(b"Transfer-Encoding: foo\r\n", GOOD), 400),
    "an encoded body": (request(b"Content-Encoding: gzip\r\nContent-Length: %d\r\n" % len(GOOD), GOOD), 400),
    "a time limit": (request(b"X-Request-Timeout: 1e400\r\nContent-Length: %d\r\n" % len(GOOD), GOOD), 400),
}
BODIES = {
    "chunks over the limit": (chunked(*[b"x" * 2**18] * 20), 413),
    "good chunks over the limit": (chunked(GOOD, *[b" " * 2**18] * 20), 413),
    "a chunk without size": (request(b"Transfer-Encoding: chunked\r\n", b"zz\r\n{}"), 400),
    "an extension with a bare LF": (request(CHUNKED, b"2;a\nb\r\n{}\r\n0\r\n\r\n"), 400),
    "a size with a bare LF": (request(CHUNKED, b"2\n{}\r\n0\r\n\r\n"), 400),
    "a last chunk with a bare LF": (request(CHUNKED, b"2\r\n{}\r\n0;\n\r\n\r\n"), 400),
    "an endless extension": (request(CHUNKED, b"2;" + b"a" * 100_000), 400),
    "endless trailers": (request(CHUNKED, b"2\r\n{}\r\n0\r\n" + b"X-A: b\r\n" * 20_000), 400),
    "a size of 20 digits": (request(CHUNKED, b"0" * 19 + b"2\r\n{}\r\n0\r\n\r\n"), 400),
    "nothing": (sized(b""), 400),
    "bad UTF-8": (sized(b'{"messages": "\xff\xfe\xfa"}'), 400),
    "half a character": (sized(b'{"messages": "\\ud800"}'), 400),
    "deep lists": (sized(b"[" * 200_000), 400),
    "deep objects": (sized(b'{"a":' * 120_000), 400),
    "deep objects in a field": (sized(b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"), 400),
    "a huge integer": (sized(b'{"max_tokens": ' + b"9" * 10_000 + b"}"), 400),
    "a large integer": (sized(b'{"messages": [], "seed": 99999999999999999999}'), 400),
    "a huge number": (sized(b'{"temperature": 1e99999}'), 400),
    "NaN": (sized(b'{"temperature": NaN}'), 400),
    "Infinity": (sized(b'{"temperature": -Infinity}'), 400),
    "two documents": (sized(GOOD + GOOD), 400),
}
CASES = LINES | HEADERS | BODIES


@pytest.mark.parametrize("case", CASES)
def test_refused(fast: Running, case: str) -> None:
    """An invalid or forbidden request gets a 4xx with a JSON body that reveals nothing of the code."""
    data, expected = CASES[case]
    status, head, body = raw(fast, data)
    assert status == expected, body
    assert b"application/json" in head
    assert b"\r\nX-Content-Type-Options: nosniff" in head
    assert b"\r\nX-Request-Id: req-" in head
    # MLflow's form where no path is known, or one of no dialect
    assert list(json.loads(body)) == (["error_code", "message"] if case in LINES else ["error"])
    assert not [word for word in TREE if word in body]


def test_refused_under_the_callers_id(fast: Running) -> None:
    """A refusal has the caller's X-Request-Id where the parser has read it, and is in the log under it."""
    data = request(b"X-Request-Id: mine-1\r\nContent-Length: abc\r\n", GOOD)
    assert b"\r\nX-Request-Id: mine-1\r\n" in raw(fast, data)[1] + b"\r\n"
    until(lambda: '"mine-1"' in fast.log())
    entries = [json.loads(line) for line in fast.log().splitlines() if '"mine-1"' in line]
    assert [(entry["event"], entry["status"], entry["path"]) for entry in entries] == [("refused", 400, PATH)]


def test_serves_on(fast: Running) -> None:
    """After all those refusals the server answers chunked and whole bodies."""
    assert raw(fast, chunked(GOOD[:20], GOOD[20:]))[0] == 200
    assert raw(fast, sized(GOOD))[0] == 200
    assert ask(fast, BODY)[0] == 200
    assert "Traceback" not in fast.log()


def test_loopback_by_default() -> None:
    """Without a setting a server listens on loopback alone."""
    assert ServerSettings().host == "127.0.0.1"
