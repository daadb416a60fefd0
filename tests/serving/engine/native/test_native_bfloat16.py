"""Models, or their keys and values alone, in bfloat16: close to float32, and bitwise the same in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kept_runs
import numpy as np
import pytest
import torch
import transformers as tf
from engine_runs import run
from kept_runs import MODELS, WIDE, has_bf16_tiles
from tiny_models import make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.attention.slot_cache import BF16_LAYOUT
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.models import loader
from mlflow_llm.serving.engine.models.loader import load_model
from mlflow_llm.serving.engine.native.library import (
    AMX,
    EMULATED_TILES,
    NO_TILES,
    NotNative,
    has_bf16,
    library,
    num_native_threads,
    tiles,
    use_threads,
    use_tiles,
)
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.request import Beams
from mlflow_llm.serving.interface.settings import EngineSettings

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler, or a CPU without AVX2")

BF16_KV: dict[str, Any] = {"kv_cache_dtype": "bfloat16", "kv_cache_memory": 1 << 25}


@pytest.fixture(autouse=True)
def tiles_that_multiply_bf16() -> Iterator[None]:
    """Use tiles that multiply bfloat16: the CPU's own, or emulated ones."""
    before, used = num_native_threads(), tiles()
    use_threads(2)
    use_tiles(AMX if has_bf16_tiles() else EMULATED_TILES)
    yield
    use_threads(before)
    use_tiles(used)


def loaded_model(config: Any, folder: Path, **settings: Any) -> Any:
    return load_model(save_bundle(make_model(config), folder), EngineSettings(**BF16_KV | settings))


def logits_of(loaded: Any, tokens: Any, cuts: list[int], **more: Any) -> Any:
    return kept_runs.logits_of(loaded, tokens, cuts, **BF16_LAYOUT | more if "dtype" not in more else more)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_token_is_bitwise_the_same_however_it_was_computed(name: str, tmp_path: Path) -> None:
    """Chunks, neighbours, threads and earlier contents of the memory change no bit."""
    loaded = loaded_model(MODELS[name](), tmp_path)
    count = 1100 if has_bf16_tiles() else 600
    tokens = np.random.default_rng(0).integers(0, 131, count)
    whole = logits_of(loaded, tokens, [count])
    for cuts, beside, threads in (
        ([5, 33, 64, 512, 555, count - 1, count], 0, 2),
        ([512, count - 1, count], 3, 1),
        ([1, 2, 3, 97, count], 2, 5),
    ):
        assert torch.equal(logits_of(loaded, tokens, cuts, beside=beside, threads=threads), whole)
    assert torch.equal(logits_of(loaded, tokens, [65, count - 1, count], fill=float("nan")), whole)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_logits_are_near_those_in_float32(dim: int, tmp_path: Path) -> None:
    """Logits are close to float32's for heads of every width, within the rounding of keys, values, queries and
    weights."""
    loaded = loaded_model(MODELS["qwen3"](dim), tmp_path)
    tokens = np.random.default_rng(1).integers(0, 131, 150)
    exact = logits_of(loaded, tokens, [150], dtype=torch.float32)
    found = logits_of(loaded, tokens, [70, 149, 150])
    assert float((found - exact).norm() / exact.norm()) < 0.01
    assert not torch.equal(found, exact)


@pytest.mark.skipif(not has_bf16_tiles(), reason="a CPU without AMX for bfloat16")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_emulated_tiles_equal_the_cpus_own(name: str, tmp_path: Path) -> None:
    """Emulated tiles give the bits of the CPU's instructions."""
    loaded = loaded_model(MODELS[name](), tmp_path)
    tokens = np.random.default_rng(2).integers(0, 131, 140)
    found = logits_of(loaded, tokens, [100, 139, 140])
    use_tiles(EMULATED_TILES)
    assert torch.equal(logits_of(loaded, tokens, [100, 139, 140]), found)


def core_of(tmp_path: Path, **settings: Any) -> EngineCore:
    bundle = save_bundle(make_model(MODELS["qwen3"]()), tmp_path)
    return EngineCore(bundle, EngineSettings(**BF16_KV | settings))


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_prefixes_beams_and_drafts_leave_texts_as_they_are(quantization: str, tmp_path: Path) -> None:
    """A prefix that ends within a block of values, forks of beams and drafted tokens leave texts as they are alone."""
    prompt = prompt_of(75, 3)
    asked = [
        request_of("whole", prompt, max_tokens=9, logprobs=2),
        request_of("branch", prompt[:41] + prompt_of(30, 4), max_tokens=9, logprobs=2),
        request_of("repeating", prompt[:5] * 9, max_tokens=30, logprobs=1, temperature=0.7),
        request_of("beams", prompt[:50], max_tokens=12, beams=Beams(width=4), n=2),
    ]
    alone = {}
    for request in asked:
        core = core_of(tmp_path, quantization=quantization, prefix_caching=False, speculation="none")
        assert core.info.kernels == "native"
        assert core.info.kv_cache_dtype == "bfloat16"
        alone |= run(core, request)
        core.close()
    core = core_of(tmp_path, quantization=quantization, max_num_batched_tokens=48)
    run(core, request_of("first", prompt, max_tokens=2))
    together = run(core, *asked)
    warm = run(core, *asked)
    core.close()
    for request in asked:
        name = request.request_id
        for found in (together[name], warm[name]):
            assert found.tokens == alone[name].tokens
            assert found.logprobs == alone[name].logprobs


def test_the_same_memory_keeps_twice_as_much(tmp_path: Path) -> None:
    """The same memory in bytes holds twice as many tokens."""
    totals = []
    for kind in ("auto", "bfloat16"):
        core = core_of(tmp_path, kv_cache_dtype=kind)
        totals.append(core.parts.cache.num_tokens_total)
        core.close()
    assert totals[1] == 2 * totals[0]


def kept_in(folder: Path, config: Any = MODELS["qwen3"], **settings: Any) -> tuple[Any, bool]:
    """Return the dtype of keys and values, and whether the step is native."""
    loaded = load_model(save_bundle(make_model(config()), folder), EngineSettings(**settings))
    return loaded.kept["dtype"], loaded.decoder is not None


def test_a_float32_cache_is_refused_for_a_bfloat16_model(tmp_path: Path) -> None:
    """A float32 cache is refused for a model that computes in less, since its values are rounded already."""
    with pytest.raises(PackagingError, match=r"kv_cache_dtype: 'float32' is not allowed; .*in bfloat16"):
        kept_in(tmp_path, dtype="bfloat16", kv_cache_dtype="float32")


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        (MODELS["qwen3"], {"kernels": "torch"}, "the setting kernels is 'torch'"),
        (lambda: tf.CohereConfig(**WIDE), {}, "does not support its architecture"),
        (lambda: tf.LlamaConfig(**WIDE), {}, "the head width 16 is not a multiple of 32"),
    ],
)
def test_an_unsupported_bfloat16_cache_is_refused(config: Any, settings: Any, reason: str, tmp_path: Path) -> None:
    """A bfloat16 cache that cannot be used is refused by name and with the reason."""
    with pytest.raises(PackagingError, match=f"kv_cache_dtype: 'bfloat16' is not allowed.*{reason}"):
        loaded_model(config(), tmp_path, **settings)


def test_a_cpu_without_tiles_is_named(tmp_path: Path) -> None:
    """On a CPU without tiles the setting is refused with that reason."""
    use_tiles(NO_TILES)
    with pytest.raises(PackagingError, match="the CPU lacks AMX for bfloat16"):
        loaded_model(MODELS["qwen3"](), tmp_path)


def test_tiles_that_are_refused_after_the_load(tmp_path: Path) -> None:
    """Tiles refused after the load are an error of the step, not an illegal instruction that ends the process."""
    loaded = loaded_model(MODELS["qwen3"](), tmp_path)
    use_tiles(NO_TILES)
    with pytest.raises(RuntimeError, match="keys and values in bfloat16 need tiles, which are off"):
        logits_of(loaded, np.arange(5), [5])


in_bfloat16 = pytest.mark.skipif(not has_bf16(), reason="a CPU without AVX-512 BF16")


@in_bfloat16
@pytest.mark.parametrize("use", [AMX, NO_TILES, EMULATED_TILES])
def test_a_model_in_bfloat16_is_bitwise_reproducible(use: int, tmp_path: Path) -> None:
    """With or without tiles, a token has the same bits in any chunks, beside others and on any number of threads, and
    its logits are close to float32's. Without tiles keys and values stay in float32."""
    tiled = use_tiles(use) != NO_TILES and (use == EMULATED_TILES or has_bf16_tiles())
    loaded = load_model(save_bundle(make_model(MODELS["qwen3"]()), tmp_path), EngineSettings(dtype="bfloat16"))
    assert loaded.decoder is not None
    assert loaded.kept["dtype"] == (torch.bfloat16 if tiled else torch.float32)
    kept = dict(loaded.kept)
    tokens = np.random.default_rng(5).integers(0, 131, 150)
    whole = logits_of(loaded, tokens, [150], **kept)
    for cuts, beside, threads in (([1, 2, 40, 149, 150], 2, 1), ([64, 97, 150], 0, 3)):
        assert torch.equal(logits_of(loaded, tokens, cuts, beside=beside, threads=threads, **kept), whole)
    plain = load_model(save_bundle(make_model(MODELS["qwen3"]()), tmp_path), EngineSettings())
    exact = logits_of(plain, tokens, [150], dtype=torch.float32)
    assert 0 < float((whole - exact).norm() / exact.norm()) < 0.02


@in_bfloat16
def test_a_model_in_bfloat16_with_int8_linears(tmp_path: Path) -> None:
    """With both settings linears are in int8, the head, keys and values in bfloat16. For weights stored in bfloat16 it
    equals int8 with such keys and values."""
    bundle = save_bundle(make_model(MODELS["qwen3"]()).bfloat16(), tmp_path)
    core, other = (
        EngineCore(bundle, EngineSettings(**BF16_KV | {"quantization": "int8"} | more))
        for more in ({"dtype": "bfloat16", "kv_cache_dtype": "auto"}, {})
    )
    assert (core.info.dtype, core.info.quantization, core.info.kernels) == ("bfloat16", "int8", "native")
    assert core.info.kv_cache_dtype == "bfloat16"
    request = request_of("r", prompt_of(50, 1), max_tokens=9, logprobs=1)
    assert run(core, request)["r"].logprobs == run(other, request)["r"].logprobs
    core.close()
    other.close()


@in_bfloat16
def test_models_without_a_native_step_run_in_bfloat16_by_their_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of another architecture, with the setting, or that the self-test refuses and that is loaded again, runs
    in bfloat16 by its own code."""
    for config, settings, reason in (
        (tf.CohereConfig(**WIDE), {}, "a native step does not support its architecture"),
        (MODELS["qwen3"](), {"kernels": "torch"}, "the setting kernels is 'torch'"),
    ):
        loaded = load_model(save_bundle(make_model(config), tmp_path), EngineSettings(dtype="bfloat16", **settings))
        assert next(loaded.model.parameters()).dtype == torch.bfloat16
        assert loaded.decoder is None
        assert reason in loaded.kernels_reason
    monkeypatch.setattr(loader, "decoder_weights", refuses)
    loaded = load_model(save_bundle(make_model(MODELS["qwen3"]()), tmp_path), EngineSettings(dtype="bfloat16"))
    assert next(loaded.model.parameters()).dtype == loaded.dtype == torch.bfloat16
    assert "dtype is bfloat16" in loaded.kernels_reason or "as if" in loaded.kernels_reason


def refuses(*_: Any) -> Any:
    raise NotNative("as if its form were another")
