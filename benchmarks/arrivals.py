"""Clients in processes of their own, which the benchmarks' own work does not slow down; they print JSON.

``arrivals.py read PORT COUNT BODY_FILE`` reads so many streams of one chat until SIGTERM: the times of their chunks.
``arrivals.py send PORT PATH BODY_FILE`` sends one body: status, start and end. Times are ``time.monotonic()``.
"""

from __future__ import annotations

import http.client
import json
import signal
import sys
import threading
import time
from pathlib import Path

JSON = {"Content-Type": "application/json"}


def read(port: int, count: int, body: bytes) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in range(count)]
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())

    def one(arrivals: list[float]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", "/v1/chat/completions", body, JSON)
        answer = connection.getresponse()
        while not over.is_set() and (line := answer.readline()):
            if len(line) > 2:
                arrivals.append(time.monotonic())
        connection.close()

    readers = [threading.Thread(target=one, args=(arrivals,)) for arrivals in times]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return times


def send(port: int, path: str, body: bytes) -> tuple[int, float, float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    start = time.monotonic()
    connection.request("POST", path, body, JSON)
    answer = connection.getresponse()
    answer.read()
    return answer.status, start, time.monotonic()


if __name__ == "__main__":
    verb, port, argument, file = sys.argv[1:]
    data = Path(file).read_bytes()
    print(json.dumps(read(int(port), int(argument), data) if verb == "read" else send(int(port), argument, data)))
