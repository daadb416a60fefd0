"""A real server with a store: what callers saw is what the ledger says, a row a request."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from instant_model import write_instant_model
from server_calls import BODY, asking, health, lines, until
from serving_process import Running, running

from mlflow_llm.serving.metering import Limits, Store, Usage, UsageFilter
from mlflow_llm.serving.metering.proof.recorded import recorded


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path_factory.mktemp('store') / 'ledger.db'}")
    yield store
    store.close()


@pytest.fixture(scope="module")
def metered(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a server of two workers, 5 ms a step, with one database."""
    root: Path = tmp_path_factory.mktemp("metered")
    url = f"sqlite:///{store.engine.url.database}"
    bundle = write_instant_model(root, step_delay=0.005)
    with running(bundle, workers=2, database=url, state_dir=str(root / "state")) as server:
        yield server


def rows(store: Store) -> dict[str, object]:
    return {row.request_id: row for row in Usage(store).rows(UsageFilter())}


def settled(store: Store, before: set[str]) -> list[object]:
    """Return the rows added since ``before``, once none of them is open."""
    new = lambda: [row for name, row in rows(store).items() if name not in before]  # noqa: E731
    until(lambda: new() and all(row.status != "open" for row in new()))
    return new()


def test_whole_and_streamed_replies_are_settled(metered: Running, store: Store) -> None:
    """Each request leaves one row with the usage that its client got."""
    before = set(rows(store))
    reported = []
    for number in range(4):
        with asking(metered, BODY | {"max_tokens": 3 + number}) as answer:
            reported.append(json.loads(answer.read())["usage"])
        body = BODY | {"max_tokens": 10 + number, "stream": True, "stream_options": {"include_usage": True}}
        with asking(metered, body) as answer:
            chunks = [json.loads(e[6:]) for e in answer.read().decode().split("\n\n") if e.startswith("data: {")]
            reported.append(next(c["usage"] for c in chunks if c.get("usage")))
    found = settled(store, before)
    assert len(found) == 8
    assert {row.status for row in found} == {"ok"}
    assert sorted((r.prompt_tokens, r.completion_tokens) for r in found) == sorted(
        (usage["prompt_tokens"], usage["completion_tokens"]) for usage in reported
    )


def test_rows_recognise_streamed_and_whole_answers(metered: Running, store: Store) -> None:
    """A row has the hash of its answer, whether its tokens were written one by one or the reply was whole."""
    before = set(rows(store))
    with asking(metered, BODY | {"max_tokens": 30}) as answer:
        whole = json.loads(answer.read())["choices"][0]["message"]["content"]
    with asking(metered, BODY | {"max_tokens": 31, "stream": True}) as answer:
        chunks = [json.loads(e[6:]) for e in answer.read().decode().split("\n\n") if e.startswith("data: {")]
    streamed = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    texts = {30: whole, 31: streamed}
    for row in settled(store, before):
        past = recorded(store, row.request_id)
        assert past.choices_with(texts[row.completion_tokens]) == [0]
        assert past.choices_with(texts[row.completion_tokens][:-1]) == []


def test_a_disconnect_is_settled(metered: Running, store: Store) -> None:
    """A client that leaves pays for what was generated until then."""
    before = set(rows(store))
    with asking(metered, BODY | {"stream": True, "max_tokens": 4000}) as answer:
        for _ in range(20):
            answer.readline()
    (row,) = settled(store, before)
    assert row.status == "aborted"
    assert 8 <= row.completion_tokens < 4000


def test_a_disconnect_of_a_whole_reply_is_settled(metered: Running, store: Store) -> None:
    """A client that leaves while it waits for a reply that is not streamed pays for what was generated until then."""
    before, known = set(rows(store)), len(lines(metered, "/invocations"))
    until(lambda: health(metered)["running"] == 0)
    steps = health(metered)["steps"]
    payload = json.dumps(BODY | {"max_tokens": 4000}).encode()
    head = "POST /invocations HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", metered.port)) as caller:
        caller.sendall(head.encode() + payload)
        until(lambda: bool(set(rows(store)) - before) and health(metered)["steps"] > steps + 2)
    (row,) = settled(store, before)
    assert row.status == "aborted"
    assert 1 <= row.completion_tokens < 4000
    until(lambda: len(lines(metered, "/invocations")) > known)
    reported = lines(metered, "/invocations")[-1]
    assert (reported["status"], reported["completion_tokens"]) == (499, row.completion_tokens)


def test_a_refused_request_leaves_no_row(metered: Running, store: Store) -> None:
    """An invalid request is not in the ledger."""
    before = set(rows(store))
    with asking(metered, BODY | {"temperature": 9}) as answer:
        assert answer.status == 400
    assert set(rows(store)) == before


def test_limit(metered: Running, store: Store) -> None:
    """Headers have the rest of a limit; a request over it is a 429 with Retry-After and has no row."""
    limits = Limits(store)
    queries = len(rows(store))
    limits.set("endpoint", "assistant", "qph", queries + 1)
    try:
        with asking(metered, BODY) as answer:
            assert answer.status == 200
            assert answer.headers["x-ratelimit-limit-requests"] == str(queries + 1)
            assert answer.headers["x-ratelimit-remaining-requests"] == "0"
            assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
        before = set(rows(store))
        with asking(metered, BODY) as answer:
            assert answer.status == 429
            assert int(answer.headers["Retry-After"]) >= 1
        assert set(rows(store)) == before
    finally:
        limits.remove("endpoint", "assistant", "qph")


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGQUIT])
def test_what_was_delivered_is_settled_before_the_server_leaves(tmp_path: Path, ending: signal.Signals) -> None:
    """After SIGINT a stream gets a final error event, and no row is left open, be it of a stream, a stalled client or a
    whole reply.
    """
    store = Store(f"sqlite:///{tmp_path}/ledger.db")
    bundle = write_instant_model(tmp_path, step_delay=0.02)
    long = BODY | {"max_tokens": 4000, "ignore_eos": True}
    options = {
        "database": f"sqlite:///{tmp_path}/ledger.db",
        "state_dir": str(tmp_path / "state"),
        "drain_timeout": 300,
    }
    with running(bundle, **options) as server:
        waiting = threading.Thread(target=asked_in_vain, args=(server, long))
        waiting.start()
        with asking(server, long | {"stream": True}) as answer, asking(server, long | {"stream": True}):
            for _ in range(40):
                answer.readline()
            until(lambda: len(rows(store)) == 3)
            server.process.send_signal(ending)
            rest = answer.read().decode()
        server.process.wait(240)
        waiting.join()
    assert "the server stopped before the reply was complete" in rest
    found = list(rows(store).values())
    assert [(row.status, row.finish_reason) for row in found] == [("error", "error")] * 3
    received = 15 + rest.count('"content":')
    assert max(row.completion_tokens for row in found) >= received
    store.close()


def asked_in_vain(server: Running, body: dict[str, Any]) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException), asking(server, body) as answer:
        answer.read()
