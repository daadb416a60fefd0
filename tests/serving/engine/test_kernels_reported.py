"""An engine says which kernels it runs on, and why not ours."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers as tf
from tiny_models import COMMON, make_model, save_bundle

from mlflow_llm.serving import child
from mlflow_llm.serving.bundle import Bundle
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.interface import EngineInfo
from mlflow_llm.serving.engine.native import library
from mlflow_llm.serving.settings import EngineSettings

WIDE: dict[str, Any] = COMMON | {"hidden_size": 64}
SIZES = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
here = pytest.mark.skipif(library.library() is None, reason="no compiler, or a processor without AVX-512 VNNI")


def info_of(bundle: Bundle, **settings: Any) -> EngineInfo:
    core = EngineCore(bundle, EngineSettings(kv_cache_memory=1 << 24, **settings))
    core.close()
    return core.info


@here
@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        (tf.LlamaConfig(**WIDE), {"kernels": "torch"}, "the setting kernels is 'torch'"),
        (tf.LlamaConfig(**WIDE), {"dtype": "float16"}, "dtype is float16"),
        (tf.CohereConfig(**WIDE), {}, "CohereForCausalLM"),
        (tf.LlamaConfig(**COMMON), {}, "heads of"),
    ],
)
def test_why_a_decoder_is_not_run_natively(config: Any, settings: Any, reason: str, tmp_path: Path) -> None:
    """The setting, the precision, the architecture or the heads are named."""
    info = info_of(save_bundle(make_model(config), tmp_path), **settings)
    assert (info.kernels, reason in info.kernels_reason) == ("torch", True), info.kernels_reason
    assert info.kernels_summary == f"torch ({info.kernels_reason})"


@here
def test_an_embedder_says_so_too(tmp_path: Path) -> None:
    """Its setting is honoured, and a model that runs natively gives no reason."""
    model = tf.BertModel(tf.BertConfig(**SIZES, num_attention_heads=2))
    bundle = msgspec.structs.replace(save_bundle(model, tmp_path), tasks=("embeddings",))
    assert info_of(bundle, kernels="torch").kernels_reason == "the setting kernels is 'torch'"
    assert (info_of(bundle).kernels, info_of(bundle).kernels_reason) == ("native", "")


def test_a_missing_library_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled, or for another processor: the engine runs, and says so."""
    monkeypatch.setattr(library, "_loaded", lambda: "the processor lacks AVX-512 VNNI")
    info = info_of(save_bundle(make_model(tf.LlamaConfig(**WIDE)), tmp_path))
    assert (info.kernels, info.kernels_reason) == ("torch", "the processor lacks AVX-512 VNNI")


def test_the_survey_of_a_child_process() -> None:
    """What ``doctor`` asks: the package that engines import, and whether its kernels run."""
    command, environment = child.python_command("serving.engine.native.survey"), child.environment()
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, check=True)
    found = json.loads(done.stdout)
    assert found["package"] == child.package_place()
    assert found["kernels"] == ("torch" if library.library() is None else "native")
