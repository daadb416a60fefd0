"""No request is lost with its engine: whatever kind it is, its answer is that of an undisturbed run."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from recovery_requests import CHAT, COMMON, COMPLETIONS, EMBEDDINGS, SAMPLED, SAYS_HI, STREAM, answer_to
from server_calls import engine_pid, health, idle, until
from serving_process import Running

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (path, COMMON | prompt | sampling | shape | stream)
    for path, prompt, shapes in (
        (CHAT, SAYS_HI, ({}, {"n": 3}, {"logprobs": True, "top_logprobs": 2})),
        (COMPLETIONS, {"prompt": ["a", "b"]}, ({}, {"n": 2}, {"echo": True})),
        (CHAT, SAYS_HI | {"model": "assistant:pirate"}, ({},)),
    )
    for shape in shapes
    for sampling in ({"temperature": 0}, SAMPLED)
    for stream in ({}, STREAM)
]


def embeddings(server: Running, over: threading.Event) -> list[tuple[int, Any]]:
    """Request the same embeddings again and again until ``over``, and return them."""
    body = {"model": "assistant", "input": ["a", "b", "c"]}
    found = [answer_to(server, EMBEDDINGS, body)]
    while not over.is_set():
        found.append(answer_to(server, EMBEDDINGS, body))
    return found


@pytest.fixture(scope="module")
def undisturbed(unsteady: Running) -> list[tuple[int, Any]]:
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        found = list(pool.map(lambda request: answer_to(unsteady, *request), REQUESTS))
    assert {status for status, _ in found} == {200}, found
    return found


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_every_kind_of_request_outlives_its_engine(
    unsteady: Running, undisturbed: list[tuple[int, Any]], fault: signal.Signals
) -> None:
    """Requests of every kind that run when their engine is killed or stopped get the text and usage of an undisturbed
    run.
    """
    over = threading.Event()
    with ThreadPoolExecutor(len(REQUESTS) + 1) as pool:
        vectors = pool.submit(embeddings, unsteady, over)
        answers = [pool.submit(answer_to, unsteady, *request) for request in REQUESTS]
        try:
            until(lambda: working(unsteady) >= len(REQUESTS) // 2)
            pid = engine_pid(unsteady)
            os.kill(pid, fault)
            found = [answer.result() for answer in answers]
        finally:
            over.set()
    for request, expected, got in zip(REQUESTS, undisturbed, found, strict=True):
        assert got == expected, request
    assert {status for status, _ in vectors.result()} == {200}
    assert all(one == vectors.result()[0] for one in vectors.result())
    assert engine_pid(unsteady) != pid
    until(lambda: idle(unsteady))


def working(server: Running) -> int:
    """Return the number of requests in the engine by its own report."""
    found = health(server)
    return int(found["running"] + found["waiting"])
