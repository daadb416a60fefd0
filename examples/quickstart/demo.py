"""Log and register a language model with two adapters and an embedding model, serve both, query them, stop them."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow

from mlflow_llm.flavors import llm

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "What is the capital of France?"
SENTENCES = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose again."]
START_TIMEOUT = 180.0  # seconds


def log_models(store: Path, models: Path) -> None:
    """Create a new local MLflow store with version 1 of ``assistant`` and of ``embedder``."""
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    mlflow.set_tracking_uri(f"sqlite:///{store}/mlflow.db")
    mlflow.set_experiment(experiment_id=mlflow.create_experiment("quickstart", artifact_location=str(store / "models")))
    with mlflow.start_run():
        llm.log_model(
            model=models / "smollm2",
            name="assistant",
            adapters={"pirate": models / "adapters" / "pirate", "json": models / "adapters" / "json"},
            registered_model_name="assistant",
        )
        llm.log_model(model=models / "minilm", name="embedder", registered_model_name="embedder")


@contextlib.contextmanager
def served(model_uri: str, log: Path) -> Iterator[str]:
    """Run ``mlflow models serve`` on a free port of this machine; yield its URL when it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", model_uri, "--env-manager", "local"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": mlflow.get_tracking_uri()}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True, cwd=log.parent
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(server, url, log)
        yield url
    finally:
        # Signal the whole process group: `mlflow models serve` is a shell that runs a server, which runs workers.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:  # a request does not end
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ping", timeout=5):
            return
        time.sleep(0.2)
    sys.exit(f"the server did not start; the end of its log:\n{log.read_text()[-2000:]}")


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/invocations", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        sys.exit(f"HTTP {error.code}: {error.read().decode()}")


def ask_everyone(url: str) -> None:
    """Ask the base model and each adapter the same question; one engine gives all three answers."""
    print(f"\nQ: {QUESTION}")
    for adapter in (None, "pirate", "json"):
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48, "temperature": 0}
        if adapter is not None:
            body["adapter"] = adapter
        reply = post(url, body)
        usage = reply["usage"]
        print(f"{adapter or 'base':>7}: {reply['choices'][0]['message']['content'].strip()}")
        print(f"         {usage['prompt_tokens']} prompt + {usage['completion_tokens']} completion tokens", flush=True)


def compare_sentences(url: str) -> None:
    reply = post(url, {"input": SENTENCES})
    first, *others = (entry["embedding"] for entry in reply["data"])
    print(f"\nE: {SENTENCES[0]!r} ({len(first)} dimensions, {reply['usage']['prompt_tokens']} tokens in total)")
    for sentence, vector in zip(SENTENCES[1:], others, strict=True):
        cosine = sum(a * b for a, b in zip(first, vector, strict=True)) / (math.hypot(*first) * math.hypot(*vector))
        print(f"   {cosine:5.2f} similar to {sentence!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=ROOT / ".cache" / "models")
    parser.add_argument("--store", type=Path, default=ROOT / ".demo", help="the store; recreated at each run")
    arguments = parser.parse_args()
    store = arguments.store.resolve()
    print("== logging and registering", flush=True)
    log_models(store, arguments.models)
    print("== serving models:/assistant/1 with `mlflow models serve`", flush=True)
    with served("models:/assistant/1", store / "assistant.log") as url:
        ask_everyone(url)
    print("\n== serving models:/embedder/1", flush=True)
    with served("models:/embedder/1", store / "embedder.log") as url:
        compare_sentences(url)


if __name__ == "__main__":
    main()
