"""Requests of tests to a server whose engines are on other hosts."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gated_core import steps_up_to
from server_calls import LONG, ask, health, text_and_usage, until
from serving_process import Running

LASTING = LONG | {"max_tokens": 300}  # three seconds, which begin when all that are asked for at once are there


def samples(server: Running) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=240) as answer:
        rows = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, value in rows if 'endpoint="assistant"' in name}


def replicas(server: Running) -> int:
    return int(samples(server)["mlflow_llm_replicas"])


def streams(server: Running, count: int, then: Callable[[], object]) -> list[tuple[str, dict]]:
    """Return text and usage of ``count`` streams, calling ``then`` while all run; engines step only then."""
    with ThreadPoolExecutor(count) as pool:
        with steps_up_to(server.model_dir, 0):
            answers = [pool.submit(ask, server, LASTING) for _ in range(count)]
            until(lambda: health(server)["running"] >= count)
            steps = health(server)["steps"]
        until(lambda: health(server)["steps"] > steps)
        then()
        return [text_and_usage(answer.result()[1].encode()) for answer in answers]
