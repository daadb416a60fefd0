"""What a body of 4 MB costs the streams beside it: the time between their tokens, with and without.

A real server with one worker and an engine that needs no weights but takes its time for each step, so that every delay
above it is the worker's: HTTP, JSON, template, tokeniser, admission. The streams' reader and the big bodies' sender are
processes of their own. ``python benchmarks/big_body.py TOKENIZER_DIR`` (a Hugging Face directory with a chat template)
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from load import free_port
from report import publish
from transformers import AutoTokenizer

from mlflow_llm.serving.bundle import Bundle
from mlflow_llm.serving.settings import EngineSettings
from mlflow_llm.serving.web.settings import ServerSettings
from mlflow_llm.serving.web.spec import EndpointSpec, ServeSpec

CORE = "mlflow_llm.serving.engine.instant:InstantCore"
SIZE = 4 * 10**6
WORDS = "the quick brown fox jumps over the lazy dog, and then it sleeps until noon. "
QUIET, GAP = 2.0, 0.3


def bodies(special: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Path and body of each kind of 4 MB, by what happens to it."""
    text = (WORDS * (SIZE // len(WORDS) + 1))[:SIZE]
    chat, completions, embeddings = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
    big = {"model": "big", "max_tokens": 1}
    return {
        "chat, refused as too long": (chat, {"model": "small", "messages": [{"role": "user", "content": text}]}),
        "chat, taken": (chat, big | {"messages": [{"role": "user", "content": text}]}),
        "chat of 20,000 messages, taken": (chat, big | {"messages": _turns(text, 20_000)}),
        "chat with special tokens in it": (chat, big | {"messages": [{"role": "user", "content": special + text}]}),
        "completion, truncated": (
            completions,
            {"model": "small", "prompt": text, "max_tokens": 1, "error_behavior": "truncate", "use_raw_prompt": True},
        ),
        "completion of token ids, taken": (completions, big | {"prompt": [i % 9000 + 1000 for i in range(SIZE // 6)]}),
        "embeddings of 2,000 texts": (embeddings, {"model": "big", "input": _split(text, 2000)}),
    }


def _split(text: str, count: int) -> list[str]:
    size = len(text) // count
    return [text[i * size : (i + 1) * size] for i in range(count)]


def _turns(text: str, count: int) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": part} for i, part in enumerate(_split(text, count - 1))]


def bundle(root: Path, tokenizer: Path, context: int, step: float) -> Bundle:
    root.mkdir()
    model = {"vocab_size": 32000, "max_model_len": context, "step_delay": step}
    (root / "instant.json").write_text(json.dumps(model))
    return Bundle(
        content_hash=f"{context}",
        tasks=("chat", "completions", "embeddings"),
        model_dir=str(root),
        tokenizer_dir=str(tokenizer),
    )


@contextlib.contextmanager
def server(tokenizer: Path, step: float) -> Iterator[int]:
    """The port of a server with endpoints ``streams`` (steps of ``step`` seconds), ``small`` and ``big`` (context)."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="mll-") as runtime:
        root = Path(runtime)
        engines = {"streams": (8192, step), "small": (8192, 0.0), "big": (2**22, 0.0)}
        spec = ServeSpec(
            endpoints=tuple(
                EndpointSpec(
                    name=name,
                    entity=name,
                    bundle=bundle(root / name, tokenizer, context, delay),
                    core=CORE,
                    engine=EngineSettings(idle_timeout=0.3),
                )
                for name, (context, delay) in engines.items()
            ),
            settings=ServerSettings(port=port, workers=1),
            runtime_dir=str(root / "r"),
        )
        path = root / "spec.json"
        path.write_bytes(msgspec.json.encode(spec))
        command = [sys.executable, "-m", "mlflow_llm.serving.cli", "serve", "--spec", str(path)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not _ready(port):
                time.sleep(0.2)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            time.sleep(1.5)  # the engines end behind their last client


def _ready(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def read_streams(port: int, count: int, seconds: float) -> None:
    """Run as a process: read ``count`` streams until SIGTERM and print the arrival times of their chunks as JSON."""
    times: list[list[float]] = [[] for _ in range(count)]
    body = {
        "model": "streams",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 8000,
        "ignore_eos": True,
        "stream": True,
    }
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())

    def read(arrivals: list[float]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        while not over.is_set() and (line := answer.readline()):
            if len(line) > 2:
                arrivals.append(time.monotonic())
        connection.close()

    readers = [threading.Thread(target=read, args=(arrivals,)) for arrivals in times]
    for reader in readers:
        reader.start()
    over.wait(seconds)
    over.set()
    for reader in readers:
        reader.join()
    print(json.dumps(times))


def send(port: int, path: str, file: str) -> None:
    """Run as a process: send the body in ``file`` and print status, start and end as JSON."""
    data = Path(file).read_bytes()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    start = time.monotonic()
    connection.request("POST", path, data, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    print(json.dumps([answer.status, start, time.monotonic()]))


def measure(port: int, kind: str, path: str, body: dict[str, Any], streams: int, repeat: int) -> dict[str, Any]:
    """Gaps between tokens, in ms: before the first body, and from each body's start until its answer."""
    me = [sys.executable, __file__]
    data = json.dumps(body)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(data)
        file.flush()
        seconds = QUIET + 60.0
        reader = subprocess.Popen([*me, "--streams", str(port), str(streams), str(seconds)], stdout=subprocess.PIPE)
        time.sleep(QUIET + 1.0)
        quiet_until = time.monotonic()
        sent = []
        for _ in range(repeat):
            done = subprocess.run([*me, "--send", str(port), path, file.name], stdout=subprocess.PIPE, check=True)
            sent.append(json.loads(done.stdout))
            time.sleep(GAP)
        reader.send_signal(signal.SIGTERM)
        out, _ = reader.communicate(timeout=90)
    times = json.loads(out)
    without = _gaps(times, [(quiet_until - QUIET, quiet_until)])
    with_body = _gaps(times, [(start, end) for _, start, end in sent])
    return {
        "body": kind,
        "MB": len(data) / 1e6,
        "status": sent[0][0],
        "its own time, ms": 1e3 * float(np.median([end - start for _, start, end in sent])),
        "gap p50, ms": _at(without, 50),
        "gap p99, ms": _at(without, 99),
        "largest gap, ms": _at(without, 100),
        "with: p50, ms": _at(with_body, 50),
        "with: p99, ms": _at(with_body, 99),
        "with: largest, ms": _at(with_body, 100),
    }


def _gaps(times: list[list[float]], windows: list[tuple[float, float]]) -> list[float]:
    """Milliseconds between neighbouring arrivals of one stream that overlap with a window."""
    found = []
    for arrivals in times:
        for one, two in itertools.pairwise(arrivals):
            if any(one < end and two > start for start, end in windows):
                found.append(1e3 * (two - one))
    return found


def _at(values: list[float], percentile: float) -> float | None:
    return float(np.percentile(values, percentile)) if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    special = AutoTokenizer.from_pretrained(arguments.tokenizer).eos_token
    with server(arguments.tokenizer, arguments.step_ms / 1e3) as port:
        rows = [
            measure(port, kind, path, body, arguments.callers, arguments.repeat)
            for kind, (path, body) in bodies(special).items()
            if arguments.only in kind
        ]
    publish("big_body", rows, streams=arguments.callers, step_ms=arguments.step_ms)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--streams"]:
        read_streams(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    elif sys.argv[1:2] == ["--send"]:
        send(int(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        main()
