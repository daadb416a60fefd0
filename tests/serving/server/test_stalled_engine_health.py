"""The report of ``/health`` on an engine that has work and makes no progress."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from typing import Any

from server_calls import LONG, asking, engine_pid, engine_pids, idle, text_and_usage, until
from serving_process import Running


def probe(server: Running, path: str = "/health") -> tuple[int, dict[str, Any]]:
    """Return the status and the endpoint's state."""
    try:
        with urllib.request.urlopen(f"{server.url}{path}", timeout=240) as answer:
            return answer.status, json.load(answer)["endpoints"]["assistant"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["endpoints"]["assistant"]


def test_a_stall_and_its_end(unsteady: Running) -> None:
    """An engine that stalls for ``stall_timeout`` makes ``/health`` and ``/ready`` a 503 with its state; its successor
    makes them a 200, and the stream loses nothing.
    """
    until(lambda: idle(unsteady))
    with asking(unsteady, LONG) as answer:
        expected = text_and_usage(answer.read())
    pid = engine_pid(unsteady)
    with asking(unsteady, LONG) as answer:
        first = answer.readline()
        assert probe(unsteady)[0] == 200
        os.kill(pid, signal.SIGSTOP)
        until(lambda: probe(unsteady)[0] == 503)
        seen = [found for _ in range(3) for path in ("/health", "/ready") for found in [probe(unsteady, path)]]
        assert all(state["status"] in ("stalled", "starting") for status, state in seen if status == 503), seen
        until(
            lambda: engine_pids(unsteady) not in (set(), {pid})
        )  # the worker without requests may still report healthy
        until(lambda: probe(unsteady)[0] == 200 and probe(unsteady, "/ready")[0] == 200)
        assert text_and_usage(first + answer.read()) == expected
    until(lambda: idle(unsteady))
