"""Clients that ask for everything at once, leave when they like, and remember what they received."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Record:
    """The outcome of one request as its client saw it.

    ``status`` None: no answer came. ``received`` counts tokens. ``refused``: the body of an answer that is not a
    200, if it came: a worker can be killed between the head and the body of its answer. ``error``: how the
    connection or the stream broke.
    """

    serial: int
    kind: str
    tenant: str
    status: int | None = None
    ids: set[str] = field(default_factory=set)
    received: int = 0
    complete: bool = False
    usage: dict[str, int] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    refused: dict[str, Any] | None = None
    error: str = ""


PAUSE = 0.3  # seconds a client waits when the server is busy or gone

KINDS = {  # of a hundred requests
    "stream": 30,
    "whole": 20,
    "stop": 5,
    "batch": 7,
    "choices": 6,
    "leave": 10,
    "hang up": 6,
    "late": 3,
    "embed": 5,
    "bad field": 3,
    "n": 2,
    "bad key": 1,
    "too long": 2,
}


def body_of(kind: str, serial: int, draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request, with its serial in the prompt behind "#"."""
    prompt = f"{'word ' * draw.randrange(8)}#{serial}"
    body: dict[str, Any] = {"model": "assistant", "max_tokens": draw.randrange(1, 25), "ignore_eos": True}
    body |= {"temperature": draw.choice([0, 1.0]), "seed": serial}
    chat = {"messages": [{"role": "user", "content": prompt}], "logprobs": True}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    if kind == "embed":
        return "/v1/embeddings", {"model": "assistant", "input": prompt}
    if kind == "batch":
        prompts = {"prompt": [f"first #{serial}", f"second #{serial}"], "logprobs": 0}
        return "/v1/completions", body | prompts | (streamed if draw.random() < 0.5 else {})
    if kind == "choices":  # several choices are for reserved throughput alone
        choices = {"model": "reserved", "n": draw.randrange(2, 4), "temperature": 1.0}
        return "/v1/chat/completions", body | chat | choices | (streamed if draw.random() < 0.5 else {})
    special = {
        "stream": streamed,
        "whole": {"ignore_eos": False},
        "stop": streamed | {"stop": ["a", "e", "1"], "max_tokens": 40},
        "leave": streamed | {"max_tokens": 400},
        "hang up": {"max_tokens": 400},
        "late": {"max_tokens": 400, "timeout": 0.05, **draw.choice([{}, streamed])},
        "bad field": {"temperature": 9},
        "n": {"n": 2},
        "too long": {"messages": [{"role": "user", "content": f"#{serial}" + "x" * 5000}]},
    }
    return "/v1/chat/completions", body | chat | special.get(kind, {})


class Load:
    """A load of ``requests`` requests by ``clients`` threads. ``tenant_of(draw)`` gives (tenant, secret)."""

    def __init__(
        self, port: int, requests: int, clients: int, tenant_of: Callable[[random.Random], tuple[str, str]], seed: int
    ) -> None:
        self._port, self._tenant_of, self._seed = port, tenant_of, seed
        self.records: list[Record] = []
        self._serials = iter(range(requests))
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(clients)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _client(self, number: int) -> None:
        draw = random.Random(f"{self._seed}-{number}")
        while True:
            with self._lock:
                serial = next(self._serials, None)
            if serial is None:
                return
            kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
            tenant, secret = self._tenant_of(draw)
            record = Record(serial, kind, tenant)
            self._one(record, "sk-unknown" if kind == "bad key" else secret, draw)
            if record.status in (None, 503):
                time.sleep(PAUSE)
            with self._lock:
                self.records.append(record)

    def _one(self, record: Record, secret: str, draw: random.Random) -> None:
        path, body = body_of(record.kind, record.serial, draw)
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=240)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {secret}"}
        try:
            connection.request("POST", path, json.dumps(body), headers)
            if record.kind == "hang up":
                connection.sock.settimeout(draw.uniform(0.0, 0.1))
            answer = connection.getresponse()
            record.status, record.headers = answer.status, {k.lower(): v for k, v in answer.getheaders()}
            if answer.status == 200 and body.get("stream"):
                _read_stream(record, answer, draw.randrange(1, 30) if record.kind == "leave" else None)
            else:
                _read_whole(record, answer)
        except (OSError, http.client.HTTPException) as error:
            record.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()


def _read_whole(record: Record, answer: http.client.HTTPResponse) -> None:
    found = json.loads(answer.read())
    if answer.status != 200:
        record.refused = found
        return
    _see(record, found)
    record.complete = True


def _read_stream(record: Record, answer: http.client.HTTPResponse, leave_after: int | None) -> None:
    for count, line in enumerate(iter(answer.readline, b"")):
        if leave_after is not None and count >= leave_after:
            return
        if not line.endswith(b"\n"):  # http.client keeps what arrived before the connection broke
            raise http.client.IncompleteRead(line)
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            record.complete = not record.error
            return
        chunk = json.loads(line[6:])
        if "error" in chunk:
            record.error = json.dumps(chunk)
        else:
            _see(record, chunk)


def _see(record: Record, found: dict[str, Any]) -> None:
    if "id" in found:
        record.ids.add(found["id"].partition("-")[2])
    record.usage = found.get("usage") or record.usage
    for choice in found.get("choices", ()):
        reported = choice.get("logprobs") or {}
        record.received += len(reported.get("content") or reported.get("tokens") or ())
