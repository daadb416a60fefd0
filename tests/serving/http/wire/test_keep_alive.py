"""Reuse of connections: one whose last body was cut off or left unread is closed."""

from __future__ import annotations

import pytest
from raw_requests import GOOD, NEXT, chunked, exchange, post, sized
from serving_process import Running

LAST = {
    "no size": (chunked(b"zz\r\n"), [400]),
    "a negative size": (chunked(b"-5\r\n"), [400]),
    "a chunk that goes on": (chunked(b"2\r\n{}{}\r\n0\r\n\r\n"), [400]),
    "a bad trailer": (chunked(b"2\r\n{}\r\n0\r\nno colon\r\n\r\n"), [400]),
    "an extension with a bare CR": (chunked(b"2;a\rb\r\n{}\r\n0\r\n\r\n"), [400]),
    "an extension with a bare LF": (chunked(b"2;a\nb\r\n{}\r\n0\r\n\r\n"), [400]),
    "no coding": (post(b"Transfer-Encoding: identity\r\nContent-Length: 2\r\n", b"{}"), [400]),
    "two codings in one": (post(b"Transfer-Encoding: gzip, chunked\r\n", b"2\r\n{}\r\n0\r\n\r\n"), [400]),
    "a NUL in the query": (b"GET /version?a=\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n", [400]),
    "no host": (b"GET /version HTTP/1.1\r\n\r\n", [400]),
    "chunks over the limit": (chunked(b"110000\r\n" + b" " * 0x110000 + b"\r\n0\r\n\r\n"), [413]),
    "chunks to no route": (chunked(b"zz\r\n", b"/v1/nothing"), [404]),
    "good chunks to no route": (chunked(b"2\r\n{}\r\n0\r\n\r\n", b"/v1/nothing"), [404]),
    "a length over the limit": (post(b"Content-Length: 100000000\r\n"), [413]),
    "a length of 30 digits": (post(b"Content-Length: " + b"9" * 30 + b"\r\n"), [413]),
    "a large body to no route": (sized(b"x" * 70_000, b"/v1/nothing"), [404]),
    "a 413 that was waited for": (post(b"Content-Length: 100000000\r\nExpect: 100-continue\r\n"), [100, 413]),
    "a 404 that was waited for": (post(b"Content-Length: 9\r\nExpect: 100-continue\r\n", path=b"/v1/x"), [100, 404]),
    "an encoded body that was waited for": (
        post(b"Content-Length: 9\r\nContent-Encoding: gzip\r\nExpect: 100-continue\r\n"),
        [100, 400],
    ),
}


@pytest.mark.parametrize("case", LAST)
def test_no_request_after_a_broken_or_unread_body(fast: Running, case: str) -> None:
    """After a body that broke off or was left unread the answer says close, and the connection ends without reading
    another request.
    """
    data, expected = LAST[case]
    statuses, answer = exchange(fast, data + NEXT)
    assert statuses == expected, answer
    assert b"\r\nConnection: close\r\n" in answer
    assert b"keep-alive" not in answer


@pytest.mark.parametrize("field", ["Upgrade, close", "close, TE", "Keep-Alive\r\nConnection: Close"])
def test_connection_close_among_other_options(fast: Running, field: str) -> None:
    """``close`` among other options, or in a second field, ends the connection with the answer, good or bad."""
    for body, status in ((GOOD, 200), (b"{", 400)):
        statuses, answer = exchange(fast, sized(body, more=b"Connection: %s\r\n" % field.encode()) + NEXT)
        assert statuses == [status], answer
        assert b"\r\nConnection: close\r\n" in answer


def test_a_short_body(fast: Running) -> None:
    """A body that ends early is a 400 and the connection's last."""
    statuses, answer = exchange(fast, post(b"Content-Length: 100\r\n", GOOD[:20]), end=True)
    assert statuses == [400]
    assert b"\r\nConnection: close\r\n" in answer


KEPT = {
    "an extension": (chunked(b'%x ; a="b c"\r\n%s\r\n0;d\r\n\r\n' % (len(GOOD), GOOD)), [200]),
    "a bad value": (sized(b'{"messages": 1}'), [400]),
    "no JSON": (sized(b"{"), [400]),
    "bad chunks of JSON": (chunked(b"1\r\n{\r\n0\r\n\r\n"), [400]),
    "good chunks": (chunked(b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)), [200]),
    "a trailer": (chunked(b"%x\r\n%s\r\n0\r\nX-A: b\r\n\r\n" % (len(GOOD), GOOD)), [200]),
    "an encoded body": (sized(GOOD, more=b"Content-Encoding: gzip\r\n"), [400]),
    "a path's beginning that is dropped": (sized(GOOD, more=b"SCRIPT_NAME: /x\r\n"), [200]),
    "no route": (sized(GOOD, b"/v1/nothing"), [404]),
    "not allowed": (sized(GOOD, b"/v1/models"), [405]),
    "a body that was waited for": (sized(GOOD, more=b"Expect: 100-continue\r\n"), [100, 200]),
}


@pytest.mark.parametrize("case", KEPT)
def test_another_request_after_a_body_that_was_read(fast: Running, case: str) -> None:
    """Behind a body that was read, or is short and announced, the connection takes the next request."""
    data, expected = KEPT[case]
    closing = NEXT.replace(b"Host", b"Connection: close\r\nHost")
    assert exchange(fast, data + NEXT + closing)[0] == [*expected, 200, 200]


def test_the_answer_to_a_body_that_is_too_large_arrives(fast: Running) -> None:
    """A client that sends all of its body before it reads gets the 413 and no reset."""
    assert exchange(fast, sized(b"x" * 20 * 2**20))[0] == [413]


def test_repeated_slashes(fast: Running) -> None:
    """A path with repeated slashes is the one meant, from the beginning on."""
    close = b"Connection: close\r\n"
    for path in (b"/v1//chat/completions", b"//v1/chat///completions"):
        statuses, answer = exchange(fast, sized(GOOD, path, close))
        assert statuses == [200], answer
    assert b"Traceback" not in fast.log().encode()
