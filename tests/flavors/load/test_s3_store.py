"""A model in an S3 store, served by two gateways that start at once. Needs the package moto, which CI does not have."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import mlflow
import pytest
from stores import empty_store, own_stores

from mlflow_llm.flavors import llm
from mlflow_llm.plugin.processes import free_port
from mlflow_llm.serving.model_files import downloads

moto_server = pytest.importorskip("moto.server", reason="an S3 store here needs the package moto[server]")
URI, PATIENCE = "models:/assistant/1", 600


class Fetched(logging.Handler):
    """A handler of the store's access log that notes which weights are fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if '"GET ' in line and ".safetensors HTTP" in line and "list-type" not in line:
            self.weights.append(line)


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama_dir: Path) -> Iterator[Fetched]:
    """Log a model, models:/assistant/1, whose artifacts are in an S3 store; return what is fetched later."""
    import boto3

    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("MLFLOW_LLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    fetched = Fetched()
    log = logging.getLogger("werkzeug")
    before = log.level
    log.setLevel(logging.INFO)
    try:
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
        client.create_bucket(Bucket="models")
        client.close()
        with own_stores(empty_store(tmp_path)):
            place = mlflow.create_experiment("s3", artifact_location="s3://models/s3")
            with mlflow.start_run(experiment_id=place):
                llm.log_model(llama_dir, name="m", registered_model_name="assistant")
            log.addHandler(fetched)
            yield fetched
    finally:
        log.removeHandler(fetched)
        log.setLevel(before)
        server.stop()


def serve(place: Path, name: str, stack: ExitStack) -> tuple[subprocess.Popen[bytes], int]:
    """Start a gateway with a state directory of its own."""
    port = free_port()
    words = ["serve", "-m", f"{URI}=assistant", "--port", str(port), "--workers", "1"]
    sink = stack.enter_context((place / f"{name}.log").open("wb"))
    started = subprocess.Popen(
        [sys.executable, "-m", "mlflow_llm.serving.cli", *words],
        env=os.environ | {"MLFLOW_LLM_STATE": str(place / name)},
        stdin=subprocess.DEVNULL,
        stdout=sink,
        stderr=sink,
        start_new_session=True,
    )
    stack.callback(_end, started)
    return started, port


def _end(started: subprocess.Popen[bytes]) -> None:
    if started.poll() is None:
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()


def answer(port: int, gateway: subprocess.Popen[bytes], log: Path) -> str:
    """Return the text that a gateway completes, once it does."""
    body = json.dumps({"model": "assistant", "prompt": "Once", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    until = time.monotonic() + PATIENCE
    while True:
        assert gateway.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
                return str(json.load(reply)["choices"][0]["text"])
        except OSError:
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)


def test_two_gateways_download_once(s3: Fetched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gateways that start at once fetch the weights once, verify them, and leave nothing in the temporary
    directory; the cache keeps the copy for the next start and lets it go at its limit.
    """
    with ExitStack() as stack:
        started = {name: serve(tmp_path, name, stack) for name in ("one", "two")}
        texts = {answer(port, gateway, tmp_path / f"{name}.log") for name, (gateway, port) in started.items()}
        assert len(texts) == 1
        assert len(s3.weights) == 1, s3.weights
        monkeypatch.setenv(downloads.LIMIT_VARIABLE, "1")
        downloads.make_room(0)  # engines hold it, so it stays
        (kept,) = [path for path in (tmp_path / "cache" / "downloads").iterdir() if path.is_dir()]
        assert list(kept.rglob("*.safetensors")) != []
        for gateway, _ in started.values():
            gateway.send_signal(signal.SIGTERM)
        for gateway, _ in started.values():
            assert gateway.wait(PATIENCE) == 0
    assert list((tmp_path / "temporary").rglob("*.safetensors")) == []
    assert [path.name for path in (tmp_path / "temporary").iterdir()] == []
    monkeypatch.delenv(downloads.LIMIT_VARIABLE)
    with llm.load_model(URI, in_process=True) as model:
        assert str(model.complete("Once", max_tokens=4, temperature=0)) in texts
    assert len(s3.weights) == 1, "the cache's copy was not used"
    monkeypatch.setenv(downloads.LIMIT_VARIABLE, "1")
    downloads.make_room(0)
    assert not kept.exists()
