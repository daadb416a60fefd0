"""The max number of tokens of a step where no setting gives it."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from tiny_models import COMMON, make_model, save_bundle

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.forward.step_size import (
    DEFAULT_TOKENS,
    MAX_TOKENS,
    MIN_TOKENS,
    CudaDevice,
    cuda_step_size,
    products_per_token,
    step_size,
)
from mlflow_llm.serving.engine.models.loader import load_model
from mlflow_llm.serving.engine.native import library
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    directory: Path = tmp_path_factory.mktemp("step-size")
    return save_bundle(make_model(tf.LlamaConfig(**COMMON | {"hidden_size": 64})), directory)


def core_of(bundle: Bundle, **settings: Any) -> EngineCore:
    return EngineCore(bundle, EngineSettings(kv_cache_memory=1 << 24, **settings))


@pytest.mark.skipif(library.library() is None, reason="no compiler, or a CPU without AVX2")
@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (1e-6, MAX_TOKENS),
        (0.0125, 1024),
        (0.0126, 992),
        (0.049, 256),
        (0.101, 96),
        (0.2, 64),
        (0.21, MIN_TOKENS),
        (60.0, MIN_TOKENS),
    ],
)
def test_step_size_is_what_prefills_in_a_fifth_of_a_second(bundle: Bundle, seconds: float, expected: int) -> None:
    """The step size follows from the time of 64 tokens: a multiple of 32 within bounds, plus the max sequences; the
    cache is unchanged."""
    core = core_of(bundle)
    parts = core.parts
    assert parts.scheduler.max_num_batched_tokens == core.info.max_num_batched_tokens
    seqs = core.info.max_num_seqs
    assert core.info.max_num_batched_tokens - seqs in range(64, 1025, 32)
    ticks = count()
    forward, vocab_size = parts.runner.step_forward, core.info.vocab_size
    assert step_size(forward, parts.cache, vocab_size, seqs, lambda: next(ticks) * seconds) == expected + seqs
    assert parts.cache.num_tokens_used == 0
    core.check_integrity()
    core.close()


def test_step_size_is_constant_without_native_kernels(bundle: Bundle) -> None:
    """On CPU, the step size is constant where a token's bits depend on its prompt's chunks; a setting overrides it."""
    for settings, expected in (({"kernels": "torch"}, DEFAULT_TOKENS), ({"max_num_batched_tokens": 77}, 77)):
        core = core_of(bundle, device="cpu", **settings)
        assert core.info.max_num_batched_tokens == expected
        core.close()


H100 = CudaDevice((9, 0), 132, 1.755e9, 80 << 30)
A100 = CudaDevice((8, 0), 108, 1.41e9, 40 << 30)
L4 = CudaDevice((8, 9), 58, 2.04e9, 24 << 30)
T4 = CudaDevice((7, 5), 40, 1.59e9, 16 << 30)


@pytest.mark.parametrize(
    ("device", "billions", "vocab_size", "expected"),
    [
        (H100, 1, 128_256, 8192),
        (H100, 8, 128_256, 4096),
        (H100, 70, 128_256, DEFAULT_TOKENS),
        (H100, 1, 1_000_000, 1024),
        (A100, 8, 128_256, 1024),
        (L4, 1, 128_256, 2048),
        (L4, 8, 128_256, DEFAULT_TOKENS),
        (T4, 1, 128_256, 2048),
    ],
)
def test_step_size_on_cuda_follows_from_device_and_model(
    device: CudaDevice, billions: int, vocab_size: int, expected: int
) -> None:
    """A step has as many tokens as the device computes in a fifth of a second, within bounds and its memory."""
    assert cuda_step_size(device, billions * 10**9, vocab_size) == expected


def test_products_of_a_token(tmp_path: Path) -> None:
    """A token is multiplied with every linear but the output head, and with the experts that it goes to."""
    config = tf.MixtralConfig(**COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2})
    loaded = load_model(save_bundle(make_model(config), tmp_path), EngineSettings(kernels="torch"))
    h, i, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    kv = config.num_key_value_heads
    width = h // heads
    attention = h * width * (heads + 2 * kv) + heads * width * h
    experts = 2 * 3 * h * i
    router = {shape for name, shape in loaded.linears.shapes.items() if "gate" in name.rpartition(".")[2]}
    each = attention + experts + sum(rows * columns for rows, columns in router)
    assert products_per_token(loaded.model, loaded.linears, loaded.config) == 2 * each
