"""A server with more to do than it can: bounded queues, time limits, a drain, and a time to come again for clients."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from server_calls import BODY, ask, asking, engine_pid, idle, until
from serving_process import Running

PATHS = ["/v1/chat/completions", "/serving-endpoints/assistant/invocations", "/invocations"]
LATE = BODY | {"max_tokens": 2000}


def test_a_full_queue_refuses(deliberate: Running) -> None:
    """An endpoint with room for four serves at least four of 24 concurrent callers; the others get a Retry-After, and
    later there is room again.
    """
    until(lambda: idle(deliberate))

    def call(number: int) -> tuple[int, str | None, str]:
        with asking(deliberate, BODY | {"stream": bool(number % 2)}) as answer:
            return answer.status, answer.headers["Retry-After"], answer.read().decode()

    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(call, range(24)))
    served = [text for status, _, text in found if status == 200]
    refused = [(after, json.loads(text)["error"]) for status, after, text in found if status == 503]
    assert len(served) + len(refused) == 24
    assert len(served) >= 4
    assert refused
    assert all(after is not None and int(after) >= 1 for after, _ in refused)
    assert {error["code"] for _, error in refused} == {"overloaded"}
    assert ask(deliberate, BODY)[0] == 200


@pytest.mark.parametrize("path", PATHS)
def test_a_time_limit_ends_a_reply(deliberate: Running, path: str) -> None:
    """``X-Request-Timeout`` ends a reply that is not streamed with a 504."""
    with limited(deliberate, LATE, path, header="0.5") as (status, text):
        assert status == 504
        assert "timeout" in text


@pytest.mark.parametrize("path", PATHS)
def test_a_time_limit_ends_a_stream(deliberate: Running, path: str) -> None:
    """``X-Request-Timeout`` ends a stream after its first tokens with an error event, and then [DONE]."""
    with limited(deliberate, LATE | {"stream": True}, path, header="3") as (status, text):
        *chunks, last, done = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
        assert (status, done) == (200, "[DONE]")
        assert len(chunks) > 2
        assert "timeout" in last


@pytest.mark.parametrize("stream", [False, True])
def test_a_time_limit_in_the_body(deliberate: Running, stream: bool) -> None:
    """The field ``timeout`` works like the header, and the shorter of both applies."""
    with limited(deliberate, LATE | {"stream": stream, "timeout": 2.0}, PATHS[0], header="100") as (status, text):
        assert status == (200 if stream else 504)
        assert "timeout" in text


@pytest.mark.parametrize("stream", [False, True])
def test_a_time_limit_holds_while_the_engine_hangs(deliberate: Running, stream: bool) -> None:
    """An engine that stands still does not keep a caller beyond its time limit."""
    until(lambda: idle(deliberate))
    pid = engine_pid(deliberate)
    os.kill(pid, signal.SIGSTOP)
    try:
        with limited(deliberate, LATE | {"stream": stream}, PATHS[0], header="0.5") as (status, text):
            assert status == 504
            assert "timeout" in text
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: idle(deliberate))


@contextmanager
def limited(server: Running, body: dict, path: str, *, header: str) -> Iterator[tuple[int, str]]:
    """Return status and text of a request with a time limit, once the engine runs nothing for it."""
    with asking(server, body, path, {"X-Request-Timeout": header}) as answer:
        yield answer.status, answer.read().decode()
    until(lambda: idle(server))
