"""A server with remote engines and a registry over HTTP: only the engines fetch weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import mlflow
import openai
import pytest
from command_processes import await_line, llm_command, running
from stores import empty_store, own_stores

from mlflow_llm.flavors import llm
from mlflow_llm.plugin.processes import free_port
from mlflow_llm.serving.control.mlflow_resolver import resolve
from mlflow_llm.serving.transport.auth import write_key


@pytest.fixture
def registry(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Provide the URL of an MLflow server that hands out artifacts itself."""
    monkeypatch.setenv(
        "LITELLM_LOCAL_MODEL_COST_MAP", "True"
    )  # without a network, mlflow waits for litellm's price list
    port = free_port()
    words = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    words += ["--backend-store-uri", empty_store(place), "--artifacts-destination", f"{place}/artifacts"]
    with running(place, "mlflow", *words) as log:
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
    """The gateway fetches tokenizer, templates and configurations only; the bundle is the same, and an engine
    answers."""
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
    engine = llm_command(place, "engine", "engine", "-m", logged, "--listen", address, "--key-file", key)
    with engine as engine_log, pytest.MonkeyPatch.context() as patch:
        await_line(engine_log, "listening on")
        patch.setenv("MLFLOW_LLM_CACHE", str(fetched))  # where downloads are kept
        words = ["serve", "-m", logged, "--engine", address, "--engine-key-file", key, "--port", str(port)]
        with llm_command(place, "serve", *words) as log:
            await_line(log, "listening on")
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            reply = client.completions.create(model="assistant", prompt="Once", max_tokens=5, temperature=0)
            assert reply.usage is not None
            assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4, 5)
            assert list(fetched.rglob("manifest.json"))
            assert not list(fetched.rglob("*.safetensors"))
