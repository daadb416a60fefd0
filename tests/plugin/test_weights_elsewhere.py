"""A server whose engines are on other hosts, with a registry behind HTTP: the weights go to the engines alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mlflow
import openai
import psutil
import pytest
from processes import alive_after
from stores import own_stores

from mlflow_llm.flavors import llm
from mlflow_llm.plugin.processes import free_port
from mlflow_llm.serving.control.mlflow_resolver import resolve
from mlflow_llm.serving.transport.auth import write_key


def words_of(place: Path, name: str, *words: str) -> contextlib.AbstractContextManager[Path]:
    return process(place, name, sys.executable, "-m", "mlflow_llm.serving.cli", *words)


@contextlib.contextmanager
def process(place: Path, name: str, *words: str) -> Iterator[Path]:
    """A command that runs, and its log; ended with SIGTERM, all its processes."""
    log = place / f"{name}.log"
    with log.open("wb") as sink:
        running = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
    try:
        yield log
    finally:
        family = psutil.Process(running.pid).children(recursive=True) if running.poll() is None else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGTERM)
        running.wait(240)
        assert not alive_after(family, 240)


def await_line(log: Path, text: str, seconds: float = 240) -> None:
    until = time.monotonic() + seconds
    while text not in log.read_text():
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.1)


@pytest.fixture
def registry(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an MLflow server that hands out artifacts itself."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # without a network mlflow waits for litellm's prices
    port = free_port()
    words = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    words += ["--backend-store-uri", f"sqlite:///{place}/mlflow.db", "--artifacts-destination", f"{place}/artifacts"]
    with process(place, "mlflow", *words) as log:
        await_line(log, "Application startup complete")
        url = f"http://127.0.0.1:{port}"
        with own_stores(url):
            yield url


@pytest.fixture
def logged(registry: str, saved_model: Path) -> str:
    mlflow.set_experiment("weights")
    with mlflow.start_run():
        llm.log_model(saved_model.parent / "hf", name="model", registered_model_name="assistant")
    return "models:/assistant/1"


def test_the_gateway_fetches_texts_only(logged: str, place: Path) -> None:
    """Tokenizer, templates and configurations come; the bundle is the same one, and an engine answers its requests."""
    (whole,) = resolve((logged,))
    (texts,) = resolve((), texts=(logged,))
    assert (texts.bundle.content_hash, texts.config, texts.uri) == (whole.bundle.content_hash, whole.config, logged)
    weights = {path.name for path in Path(whole.bundle.model_dir).iterdir()} - {
        path.name for path in Path(texts.bundle.model_dir).iterdir()
    }
    assert weights == {"model.safetensors"}
    assert sorted(os.listdir(texts.bundle.tokenizer_dir)) == sorted(os.listdir(whole.bundle.tokenizer_dir))

    key, address = str(place / "key"), f"tcp://127.0.0.1:{free_port()}"
    write_key(key)
    port = free_port()
    fetched = place / "fetched"
    fetched.mkdir()
    engine = words_of(place, "engine", "engine", "-m", logged, "--listen", address, "--key-file", key)
    with engine as engine_log, pytest.MonkeyPatch.context() as patch:
        await_line(engine_log, "listening on")
        patch.setenv("TMPDIR", str(fetched))  # where MLflow keeps what it fetches
        words = ["serve", "-m", logged, "--engine", address, "--engine-key-file", key, "--port", str(port)]
        with words_of(place, "serve", *words) as log:
            await_line(log, "listening on")
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            reply = client.completions.create(model="assistant", prompt="Once", max_tokens=5, temperature=0)
            assert reply.usage is not None
            assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4, 5)
            assert list(fetched.rglob("manifest.json"))
            assert not list(fetched.rglob("*.safetensors"))
