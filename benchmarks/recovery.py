"""The cost of ``kill -9`` of an engine: how long ``/health`` is a 503, and the pause in running streams.

Measured for an engine without weights (the cost of detection, start and connection) and for a real model: loaded anew,
mapped from its packed form, and with a standby.
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
from measured import say_kernels
from report import publish

BODY = {
    "model": "assistant",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 150,
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


def window(port: int, runtime: Path) -> tuple[float | None, float]:
    """Return the milliseconds from the kill of an idle engine to the first 503, or None if no probe met one, and to a
    200 of the next engine."""
    old = engine_pid(runtime)
    os.kill(old, signal.SIGKILL)
    killed, noticed = time.perf_counter(), None
    while not (is_well(port) and successor_of(old, runtime)):
        if noticed is None and not is_well(port):
            noticed = 1e3 * (time.perf_counter() - killed)
        time.sleep(0.002)
    return noticed, 1e3 * (time.perf_counter() - killed)


def successor_of(pid: int, runtime: Path) -> bool:
    (found,) = [json.loads(path.read_text()) for path in runtime.glob("*/status.json")]
    return bool(found["state"] == "ready" and found["pid"] != pid)


def pause(port: int, runtime: Path, streams: int) -> float:
    """Return the longest gap in milliseconds between tokens of any of ``streams`` streams whose engine is killed."""
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


def await_whole(port: int, standby: int) -> None:
    """Wait until the engine has its standby, if it is to have one."""
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            if json.load(answer)["endpoints"]["assistant"].get("standbys", 0) == standby:
                return
        time.sleep(0.1)


def measure(name: str, bundle: Any, core: str | None, streams: int, repeat: int, **engine: Any) -> dict[str, Any]:
    with big_body.running({"assistant": (bundle, core)}, **engine) as (port, runtime):
        noticed, back, gaps = [], [], []
        for _ in range(repeat):
            await_whole(port, engine.get("standby", 0))
            one, two = window(port, runtime)
            noticed += [one] if one is not None else []
            back.append(two)
            await_whole(port, engine.get("standby", 0))
            gaps.append(pause(port, runtime, streams))
    return {
        "engine": name,
        "kill to 503, ms": statistics.median(noticed) if noticed else None,
        "kill to 200, ms": statistics.median(back),
        f"pause of {streams} streams, ms": statistics.median(gaps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--callers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    say_kernels()
    instant = big_body.instant_bundle(arguments.model, 8192, 0.01)
    real = big_body.real_bundle(arguments.model)
    counts = (arguments.callers, arguments.repeat)
    rows = [
        measure("without weights", instant, big_body.CORE, *counts),
        measure(f"{arguments.model.name}, loaded", real, None, *counts, packed_cache=0),
        measure(f"{arguments.model.name}, mapped", real, None, *counts),
        measure(f"{arguments.model.name}, standby", real, None, *counts, standby=1),
    ]
    publish("recovery", rows)


if __name__ == "__main__":
    main()
