"""The effect of a body of 4 MB on concurrent streams: the time between their tokens, with and without.

A real server with one worker and an engine that needs no weights but takes its time for each step, so that every delay
above it is the worker's: HTTP, JSON, template, tokeniser, admission. The streams' reader and the big bodies' sender are
processes of their own. ``python benchmarks/big_body.py TOKENIZER_DIR`` (a Hugging Face directory with a chat template)
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import hashlib
import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
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

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.control.spec import EndpointSpec, ServeSpec
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.request import Task
from mlflow_llm.serving.interface.settings import EngineSettings

CORE = "mlflow_llm.serving.testing.instant_core:InstantCore"
SIZE = 4 * 10**6
WORDS = "the quick brown fox jumps over the lazy dog, and then it sleeps until noon. "
QUIET, GAP = 2.0, 0.3
STREAM = {
    "model": "streams",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 8000,
    "ignore_eos": True,
    "stream": True,
}


def bodies(special: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return path and body of each kind of 4 MB, by how it is processed."""
    text = (WORDS * (SIZE // len(WORDS) + 1))[:SIZE]
    chat, completions, embeddings = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
    big = {"model": "big", "max_tokens": 1}
    return {
        "chat, refused as too long": (chat, {"model": "small", "messages": [{"role": "user", "content": text}]}),
        "chat, taken": (chat, big | {"messages": [{"role": "user", "content": text}]}),
        "chat of 2,000 messages, taken": (chat, big | {"messages": _turns(text, 2000)}),
        "chat with special tokens in it": (chat, big | {"messages": [{"role": "user", "content": special + text}]}),
        "completion, truncated": (
            "/serving-endpoints/small/invocations",
            {"prompt": text, "max_tokens": 1, "error_behavior": "truncate", "use_raw_prompt": True},
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


def instant_bundle(tokenizer: Path, context: int, step: float) -> Bundle:
    """Return a bundle of an engine of ``step`` seconds a step, with a folder of its own until the process ends."""
    root = Path(tempfile.mkdtemp(prefix="mll-model-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    model = {"vocab_size": 32000, "max_model_len": context, "step_delay": step}
    (root / "instant.json").write_text(json.dumps(model))
    tasks: tuple[Task, ...] = ("chat", "completions", "embeddings")
    return Bundle(content_hash=f"{context}-{step}", tasks=tasks, model_dir=str(root), tokenizer_dir=str(tokenizer))


def real_bundle(model: Path) -> Bundle:
    tasks: tuple[Task, ...] = ("chat", "completions")
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in model.glob("*.safetensors"))
    content_hash = hashlib.sha256(repr((str(model.absolute()), files)).encode()).hexdigest()
    return Bundle(content_hash=content_hash, tasks=tasks, model_dir=str(model), tokenizer_dir=str(model))


@contextlib.contextmanager
def running(endpoints: dict[str, tuple[Bundle, str | None]], **engine: Any) -> Iterator[tuple[int, Path]]:
    """Yield port and engines' directory of a server with one worker; ``endpoints`` are bundles and engine classes by
    name, ``engine`` are settings of all."""
    port, settings = free_port(), EngineSettings(idle_timeout=0.3, **engine)
    with tempfile.TemporaryDirectory(prefix="mll-") as place:
        runtime = Path(place, "r")
        spec = ServeSpec(
            endpoints=tuple(
                EndpointSpec(name=name, entity=name, bundle=bundle, core=core, engine=settings)
                for name, (bundle, core) in endpoints.items()
            ),
            settings=ServerSettings(port=port, workers=1),
            runtime_dir=str(runtime),
        )
        path = Path(place, "spec.json")
        path.write_bytes(msgspec.json.encode(spec))
        command = [sys.executable, "-m", "mlflow_llm.serving.cli", "serve", "--spec", str(path)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not _ready(port):
                time.sleep(0.2)
            yield port, runtime
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            while any(runtime.glob("*/spec.json")):  # the engines end after their last client
                time.sleep(0.1)


def _ready(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def measure(port: int, kind: str, path: str, body: dict[str, Any], streams: int, repeat: int) -> dict[str, Any]:
    """Return gaps between tokens in ms: before the first body, and from each body's start until its answer."""
    client = [sys.executable, str(Path(__file__).with_name("arrivals.py"))]
    with tempfile.TemporaryDirectory() as place:
        big, stream = Path(place, "big.json"), Path(place, "stream.json")
        big.write_text(json.dumps(body))
        stream.write_text(json.dumps(STREAM))
        reader = subprocess.Popen([*client, "read", str(port), str(streams), str(stream)], stdout=subprocess.PIPE)
        time.sleep(QUIET + 1.0)
        quiet_until = time.monotonic()
        sent = []
        for _ in range(repeat):
            done = subprocess.run([*client, "send", str(port), path, str(big)], stdout=subprocess.PIPE, check=True)
            sent.append(json.loads(done.stdout))
            time.sleep(GAP)
        reader.send_signal(signal.SIGTERM)
        out, _ = reader.communicate(timeout=90)
        size = big.stat().st_size
    times = json.loads(out)
    without = _gaps(times, [(quiet_until - QUIET, quiet_until)])
    with_body = _gaps(times, [(start, end) for _, start, end in sent])
    return {
        "body": kind,
        "MB": size / 1e6,
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
    """Return the milliseconds between neighbouring arrivals of one stream that overlap with a window."""
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
    engines = {
        "streams": instant_bundle(arguments.tokenizer, 8192, arguments.step_ms / 1e3),
        "small": instant_bundle(arguments.tokenizer, 8192, 0.0),
        "big": instant_bundle(arguments.tokenizer, 2**22, 0.0),
    }
    with running({name: (bundle, CORE) for name, bundle in engines.items()}) as (port, _):
        rows = [
            measure(port, kind, path, body, arguments.callers, arguments.repeat)
            for kind, (path, body) in bodies(special).items()
            if arguments.only in kind
        ]
    publish("big_body", rows, streams=arguments.callers, step_ms=arguments.step_ms)


if __name__ == "__main__":
    main()
