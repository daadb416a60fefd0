"""``materialise``: a whole model from one that holds only an adapter, for places without its registry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
import yaml
from flavor_models import TEMPLATE
from mlflow.exceptions import MlflowException
from stores import empty_store, own_stores

from mlflow_llm.flavors import llm

BODY = {"prompt": "Once upon", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def adapter(store, llama_dir, adapter_dir) -> str:
    """Return a version that holds only an adapter."""
    llm.log_model(llama_dir, name="m", registered_model_name="assistant", defaults={"max_tokens": 5})
    llm.log_model(
        name="a",
        base="models:/assistant/1",
        adapters={"formal": adapter_dir},
        default_adapter="formal",
        chat_template=TEMPLATE + " ",
        registered_model_name="assistant",
    )
    return "models:/assistant/2"


def answer(uri: str) -> str:
    with llm.closing(mlflow.pyfunc.load_model(uri, model_config={"in_process": True})) as model:
        return str(model.predict(BODY)["choices"][0]["text"])


def test_the_whole_answers_without_a_registry(adapter: str, tmp_path: Path) -> None:
    """The same text, settings and template, where neither the registry nor the base is."""
    expected, before = answer(adapter), llm.load_bundle(adapter)
    root = llm.materialise(adapter, tmp_path / "whole")
    (tmp_path / "elsewhere").mkdir()
    with own_stores(empty_store(tmp_path / "elsewhere")):
        assert answer(str(root)) == expected
        bundle = llm.load_bundle(root, verify="full")
    assert bundle.model_dir.startswith(str(root))
    assert bundle.tasks == before.tasks
    assert bundle.default_adapter == "formal"
    assert Path(bundle.chat_templates["default"]).read_text() == TEMPLATE + " "
    described = yaml.safe_load((root / "MLmodel").read_text())["flavors"]["llm"]
    assert (described["base"], described["content_hash"]) == (None, bundle.content_hash)
    assert list((root / "wheels").rglob("*.whl"))


def test_a_missing_base_says_what_to_do(adapter: str, tmp_path: Path) -> None:
    """A version that is loaded without its registry, as in a container, names ``materialise``."""
    root = Path(mlflow.artifacts.download_artifacts(adapter, dst_path=str(tmp_path / "image")))
    with own_stores(empty_store(tmp_path)), pytest.raises(MlflowException, match=r"llm\.materialise\(uri, path\)"):
        mlflow.pyfunc.load_model(str(root))


def test_a_whole_model_is_copied(adapter: str, tmp_path: Path) -> None:
    """A model that has no base is written as it is; a directory with files is refused."""
    root = llm.materialise("models:/assistant/1", tmp_path / "copy")
    assert llm.load_bundle(root, verify="full").content_hash == llm.load_bundle("models:/assistant/1").content_hash
    with pytest.raises(MlflowException, match="path: copy already exists and is not empty"):
        llm.materialise("models:/assistant/1", root)


def generate_dockerfile(model: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlflow", "models", "generate-dockerfile", "-m", model, "-d", str(out)]
    variables = os.environ | {"MLFLOW_TRACKING_URI": mlflow.get_tracking_uri()}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def test_a_dockerfile_needs_a_whole_model(adapter: str, tmp_path: Path) -> None:
    """MLflow's command refuses a version that holds only an adapter, and takes the one that is written of it."""
    refused = generate_dockerfile(adapter, tmp_path / "refused")
    assert refused.returncode != 0
    assert f"{adapter} holds only an adapter over models:/assistant/1" in refused.stderr, refused.stderr
    assert f"llm.materialise('{adapter}', DIR)" in refused.stderr
    assert not (tmp_path / "refused").exists()
    whole = llm.materialise(adapter, tmp_path / "whole")
    taken = generate_dockerfile(str(whole), tmp_path / "taken")
    assert taken.returncode == 0, taken.stderr
    assert (tmp_path / "taken" / "Dockerfile").is_file()
