"""Requests of tests to a real server, and readers of its state."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
from serving_process import Running

BODY = {
    "model": "assistant",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
}


@contextlib.contextmanager
def asking(
    server: Running, body: dict | bytes, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None
) -> Iterator[http.client.HTTPResponse]:
    """Yield the open answer to a request; leaving closes the connection."""
    data = body if isinstance(body, bytes) else json.dumps(body)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=240)) as connection:
        connection.request("POST", path, data, {"Content-Type": "application/json"} | (headers or {}))
        with connection.getresponse() as answer:
            yield answer


def ask(server: Running, body: dict | bytes) -> tuple[int, str]:
    with asking(server, body) as answer:
        return answer.status, answer.read().decode()


def health(server: Running) -> dict:
    with urllib.request.urlopen(f"{server.url}/health", timeout=240) as answer:
        return json.load(answer)["endpoints"]["assistant"]


def draining(server: Running) -> bool:
    """Return whether the server reports that it takes no more requests."""
    try:
        urllib.request.urlopen(f"{server.url}/ready", timeout=240).close()
    except urllib.error.HTTPError as error:
        error.close()
        return error.code == 503
    return False


def until(condition, seconds: float = 240) -> None:
    """Wait for a condition, polling at growing intervals so as not to delay what is waited for."""
    end, pause = time.monotonic() + seconds, 0.01
    while not condition():
        assert time.monotonic() < end
        time.sleep(pause)
        pause = min(pause * 1.3, 0.2)


LONG = BODY | {"max_tokens": 200, "stream": True, "stream_options": {"include_usage": True}}


def text_and_usage(lines: bytes) -> tuple[str, dict]:
    """Return text and usage of a stream's bytes."""
    events = [line[6:] for line in lines.decode().split("\n\n") if line]
    assert events[-1] == "[DONE]", events[-2:]
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])
    return text, next(chunk["usage"] for chunk in chunks if chunk.get("usage"))


def well(server: Running) -> bool:
    """Return whether ``/health`` is a 200: a worker answers 503 until it has found the new engine."""
    try:
        health(server)
    except urllib.error.HTTPError as error:
        error.close()
        return False
    return True


def idle(server: Running) -> bool:
    """Return whether the server is healthy with nothing left to do."""
    return well(server) and health(server)["running"] == 0


def engine_pid(server: Running) -> int:
    """Return the pid of this server's engine, whose command line has its runtime directory."""
    (found,) = engine_pids(server)
    return found


def engine_pids(server: Running) -> set[int]:
    """Return the engine pids, none for the moment between an engine and its successor."""
    return {int(json.loads(p.read_text())["pid"]) for p in server.runtime.glob("*/status.json")}


def lines(server: Running, path: str) -> list[dict[str, Any]]:
    """Return the log entries of requests to ``path``."""
    entries = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    return [entry for entry in entries if entry.get("path") == path and entry["event"] == "request"]


def worker_of(server: Running, besides: set[psutil.Process] = frozenset()) -> psutil.Process | None:
    """Return a worker, other than ``besides``, that has an accepted connection."""
    for process in psutil.Process(server.process.pid).children():
        connections = process.net_connections("tcp")
        mine = [c for c in connections if c.status == "ESTABLISHED" and c.laddr.port == server.port]
        if mine and process not in besides:
            return process
    return None
