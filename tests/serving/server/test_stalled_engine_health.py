"""The report of ``/health`` on an engine that has work and makes no progress."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from server_calls import LONG, asking, engine_pid, engine_pids, idle, text_and_usage, until
from serving_process import Running

from mlflow_llm.serving.system.file_locks import FileLock
from mlflow_llm.serving.transport.discovery.state_directory import StateDirectory


def probe(server: Running, path: str = "/health") -> tuple[int, dict[str, Any]]:
    """Return the status and the endpoint's state."""
    try:
        with urllib.request.urlopen(f"{server.url}{path}", timeout=240) as answer:
            return answer.status, json.load(answer)["endpoints"]["assistant"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["endpoints"]["assistant"]


def replacement_lock(server: Running) -> FileLock:
    """Take the lock without which no process replaces this server's engine."""
    (status,) = server.runtime.glob("*/status.json")
    return StateDirectory(str(server.runtime), status.parent.name).lock()


def test_a_stall_and_its_end(unsteady: Running) -> None:
    """An engine that stalls for ``stall_timeout`` makes ``/health`` and ``/ready`` a 503 with its state; its successor
    makes them a 200, and the stream that waited for it loses nothing.
    """
    until(lambda: idle(unsteady))
    expected = stream(unsteady)
    assert probe(unsteady)[0] == 200
    pid = engine_pid(unsteady)
    lock = replacement_lock(unsteady)  # or the successor might be there before anybody has looked
    with ThreadPoolExecutor(1) as pool:
        try:
            os.kill(pid, signal.SIGSTOP)  # before the request, which might otherwise end before
            waiting = pool.submit(stream, unsteady)
            until(lambda: probe(unsteady)[0] == 503)
            seen = [found for _ in range(3) for path in ("/health", "/ready") for found in [probe(unsteady, path)]]
        finally:
            lock.release()
        assert all(state["status"] in ("stalled", "starting") for status, state in seen if status == 503), seen
        until(
            lambda: engine_pids(unsteady) not in (set(), {pid})
        )  # the worker without requests may still report healthy
        until(lambda: probe(unsteady)[0] == 200 and probe(unsteady, "/ready")[0] == 200)
        assert waiting.result() == expected
    until(lambda: idle(unsteady))


def stream(server: Running) -> tuple[str, dict[str, Any]]:
    """Return text and usage of a whole stream."""
    with asking(server, LONG) as answer:
        return text_and_usage(answer.read())
