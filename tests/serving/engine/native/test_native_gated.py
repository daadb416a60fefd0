"""The fused gate, up and activation: by tiles, and for many rows by vectors, unless a row has an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from tiny_models import COMMON, make_model, save_bundle

from mlflow_llm.serving.engine.assembly import EngineParts, assemble
from mlflow_llm.serving.engine.attention.kv_cache import PrefixKey, Row
from mlflow_llm.serving.engine.models.step_input import StepInput
from mlflow_llm.serving.engine.native import library
from mlflow_llm.serving.engine.quantize import weight_writer
from mlflow_llm.serving.interface.settings import EngineSettings

pytestmark = [
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.skipif(library.library() is None, reason="the native kernels are not here"),
]
PANELS: dict[str, Any] = COMMON | {"hidden_size": 64, "intermediate_size": 96}  # halves of whole panels
MODELS = {
    "silu": lambda: tf.LlamaConfig(**PANELS, mlp_bias=True),
    "gelu_tanh": lambda: tf.Gemma2Config(**PANELS, head_dim=16, query_pre_attn_scalar=16),
    "gelu": lambda: tf.LlamaConfig(**PANELS, hidden_act="gelu"),
}


WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"quantization": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "int4": {"quantization": "int4"},
}
MANY = 70  # tokens: enough rows for the vector kernel too


@pytest.fixture
def emulated() -> Iterator[None]:
    before = library.tiles()
    if library.use_tiles(library.EMULATED_TILES) != library.EMULATED_TILES:
        pytest.skip("kernels that take signed bytes have no tiles")
    yield
    library.use_tiles(before)


def logits(parts: EngineParts, tokens: Any, beside: str | None) -> torch.Tensor:
    """Return logits of every token of a prompt, with one more row in the step."""
    ids = np.append(tokens, 5)
    for owner, of in enumerate((tokens, ids[-1:])):
        parts.cache.acquire(owner, PrefixKey("", str(beside)), of.astype(np.int32))
    rows = [Row(0, 0, len(tokens)), Row(1, 0, 1)]
    with torch.inference_mode():
        found = parts.runner.step_forward.forward(StepInput(ids, rows, [None, beside], range(len(tokens)))).clone()
    for owner in range(2):
        parts.cache.release(owner, keep=False)
    return found


def check_rows(name: str, settings: dict[str, Any], folder: Path) -> None:
    """Check that a row is bitwise the same beside many, in a step of few and beside a row with an adapter."""
    bundle = save_bundle(make_model(MODELS[name]()), folder / "model")
    if settings.get("quantization") == "int4":
        weight_writer.quantize_files(folder / "model", bundle.tasks, "int4", [list(range(3, 131))])
    config = LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear")
    get_peft_model(make_model(MODELS[name]()), config).save_pretrained(folder / "adapter")
    parts = assemble(bundle, EngineSettings(kv_cache_memory=1 << 24, **settings))
    assert parts.info.kernels == "native"
    parts.lora.add("adapter", parts.lora.read("adapter", str(folder / "adapter")))
    tokens = np.random.default_rng(1).integers(3, 131, MANY)
    alone = logits(parts, tokens, None)
    assert torch.isfinite(alone).all()
    assert torch.equal(logits(parts, tokens, "adapter"), alone)
    assert torch.equal(logits(parts, tokens[:5], None), alone[:5])


@pytest.mark.parametrize("weights", ["int8", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("emulated")
def test_rows_by_tiles(name: str, weights: str, tmp_path: Path) -> None:
    """With tiles, a row's gated MLP is bitwise the same among many rows, few rows and adapter rows."""
    check_rows(name, WEIGHTS[weights], tmp_path)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("instructions")
def test_rows_by_vectors(name: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tiles, a row's gated MLP is bitwise the same among many rows, few rows and adapter rows."""
    monkeypatch.setattr(weight_writer, "MAX_LOSS_NATS", float("inf"))  # every eligible linear has four bits
    check_rows(name, WEIGHTS[weights], tmp_path)
