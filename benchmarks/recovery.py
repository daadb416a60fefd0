"""What ``kill -9`` of an engine costs: how long ``/health`` is a 503, and the pause in the streams that run.

Of an engine without weights (what finding, starting and connecting cost) and of a real model.
``python benchmarks/recovery.py MODEL_DIR`` (a Hugging Face directory with weights, tokenizer and chat template)
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import signal
import statistics
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import big_body
from report import publish

BODY = {
    "model": "assistant",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
    "temperature": 0,
}


def engine_pid(runtime: Path) -> int:
    (found,) = {int(json.loads(path.read_text())["pid"]) for path in runtime.glob("*/status.json")}
    return found


def is_well(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return False


def window(port: int, runtime: Path) -> tuple[float, float]:
    """Milliseconds from the kill of an idle engine to the first 503, and to the first 200 behind it."""
    os.kill(engine_pid(runtime), signal.SIGKILL)
    killed = time.perf_counter()
    while is_well(port):
        time.sleep(0.002)
    noticed = time.perf_counter()
    while not is_well(port):
        time.sleep(0.002)
    return 1e3 * (noticed - killed), 1e3 * (time.perf_counter() - killed)


def pause(port: int, runtime: Path, streams: int) -> float:
    """Milliseconds: the longest gap between tokens of any of ``streams`` streams whose engine is killed."""
    arrivals: list[list[float]] = [[] for _ in range(streams)]

    def read(times: list[float]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", "/v1/chat/completions", json.dumps(BODY), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        while line := answer.readline():
            if len(line) > 2:
                times.append(time.perf_counter())
        connection.close()

    readers = [threading.Thread(target=read, args=(times,)) for times in arrivals]
    for reader in readers:
        reader.start()
    while min(map(len, arrivals)) < 50:
        time.sleep(0.01)
    os.kill(engine_pid(runtime), signal.SIGKILL)
    for reader in readers:
        reader.join()
    return max(1e3 * (two - one) for times in arrivals for one, two in itertools.pairwise(times))


def measure(name: str, bundle: Any, core: str | None, streams: int, repeat: int) -> dict[str, Any]:
    with big_body.running({"assistant": (bundle, core)}) as (port, runtime):
        noticed, back, gaps = [], [], []
        for _ in range(repeat):
            one, two = window(port, runtime)
            noticed.append(one)
            back.append(two)
            gaps.append(pause(port, runtime, streams))
    return {
        "engine": name,
        "kill to 503, ms": statistics.median(noticed),
        "kill to 200, ms": statistics.median(back),
        f"pause of {streams} streams, ms": statistics.median(gaps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--callers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    instant = big_body.instant_bundle(arguments.model, 8192, 0.01)
    real = big_body.real_bundle(arguments.model)
    rows = [
        measure("without weights", instant, big_body.CORE, arguments.callers, arguments.repeat),
        measure(arguments.model.name, real, None, arguments.callers, arguments.repeat),
    ]
    publish("recovery", rows)


if __name__ == "__main__":
    main()
