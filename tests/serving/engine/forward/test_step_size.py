"""The max number of tokens of a step where no setting gives it."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from tiny_models import COMMON, make_model, save_bundle

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.forward.step_size import DEFAULT_TOKENS, MAX_TOKENS, MIN_TOKENS, step_size
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
    """The step size is constant where a token's bits depend on the chunks of its prompt, and a setting overrides it."""
    for settings, expected in (({"kernels": "torch"}, DEFAULT_TOKENS), ({"max_num_batched_tokens": 77}, 77)):
        core = core_of(bundle, **settings)
        assert core.info.max_num_batched_tokens == expected
        core.close()
