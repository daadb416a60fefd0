"""Keys and values in int8, with a scale for each token and head: the rounding error, and the same bits in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers as tf
from engine_runs import run
from kept_runs import MODELS, WIDE, logits_of
from tiny_models import LATENT, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.attention.kv_cache import PrefixKey, Row
from mlflow_llm.serving.engine.attention.slot_cache import INT8_LAYOUT, SlotKVCache
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.models.loader import load_model
from mlflow_llm.serving.engine.models.verification import SelfTest, model_forward
from mlflow_llm.serving.engine.native.library import (
    AMX,
    EMULATED_TILES,
    NO_TILES,
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

native = pytest.mark.skipif(library() is None, reason="no compiler, or a CPU without kernels of ours")
INT8_KV: dict[str, Any] = {"kv_cache_dtype": "int8", "kv_cache_memory": 1 << 25}
CAPPED = {"attn_logit_softcapping": 3.0, "sliding_window": 37, "query_pre_attn_scalar": 16}
ALL = MODELS | {
    "wide heads": lambda: tf.LlamaConfig(**WIDE, head_dim=64),
    "capped": lambda: tf.Gemma2Config(**WIDE | {"num_attention_heads": 16}, head_dim=64, **CAPPED),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads, used = num_native_threads(), tiles()
    use_threads(2)
    yield
    use_threads(threads)
    use_tiles(used)


def loaded_model(config: Any, folder: Path, **settings: Any) -> Any:
    return load_model(save_bundle(make_model(config), folder), EngineSettings(**INT8_KV | settings))


def found_of(loaded: Any, tokens: Any, cuts: list[int], **more: Any) -> Any:
    return logits_of(loaded, tokens, cuts, **more, **INT8_LAYOUT)


@native
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("name", sorted(ALL))
def test_a_token_is_bitwise_the_same_however_it_was_computed(name: str, tmp_path: Path) -> None:
    """Chunks, neighbours, threads, earlier contents of the memory, and tiles or none change no bit."""
    loaded = loaded_model(ALL[name](), tmp_path)
    tokens = np.random.default_rng(0).integers(0, 131, 1100)
    use_tiles(NO_TILES)
    whole = found_of(loaded, tokens, [1100])
    for use in (NO_TILES, AMX):
        use_tiles(use)
        for cuts, beside, threads in (
            ([5, 33, 64, 512, 555, 1099, 1100], 0, 2),
            ([512, 1099, 1100], 3, 1),
            ([1, 2, 3, 97, 1100], 2, 5),
        ):
            assert torch.equal(found_of(loaded, tokens, cuts, beside=beside, threads=threads), whole)
        assert torch.equal(found_of(loaded, tokens, [65, 1099, 1100], fill=float("nan")), whole)
    use_tiles(EMULATED_TILES)
    assert torch.equal(found_of(loaded, tokens[:200], [200]), whole[:200])


def hadamard(dim: int) -> Any:
    """Return Sylvester's matrix in blocks of the largest power of two that divides ``dim``, orthogonal."""
    block = torch.ones(1, 1)
    while dim % (2 * len(block)) == 0:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block] * (dim // len(block))) / len(block) ** 0.5


class Rounding:
    """A plan of torch's attention that rounds Hadamard-rotated keys and values to int8."""

    def __init__(self, plan: Any, mixed: bool) -> None:
        self._plan, self._mixed = plan, mixed

    def attend(self, layer: int, q: Any, k: Any, v: Any, *more: Any) -> Any:
        mix = hadamard(k.shape[-1]) if self._mixed else torch.eye(k.shape[-1])
        return self._plan.attend(layer, q, self._kept(k @ mix) @ mix, self._kept(v), *more)

    @staticmethod
    def _kept(x: Any) -> Any:
        scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-12)
        return torch.round(x / scale) * scale


def rounded_of(loaded: Any, tokens: Any, *, mixed: bool = True) -> Any:
    """Return logits of the model's own code over keys and values rounded to int8."""
    size = len(tokens)
    cache = SlotKVCache(loaded.layers, num_slots=1, num_tokens=256, max_model_len=256, dtype=torch.float32)
    cache.acquire(0, PrefixKey("", ""), tokens.astype(np.int32))
    plan = cache.plan
    cache.plan = lambda rows: Rounding(plan(rows), mixed)  # type: ignore[method-assign, assignment, return-value]
    return model_forward(loaded.model, loaded.holder)(cache, tokens, [Row(0, 0, size)])


def distance(found: Any, wanted: Any) -> float:
    return float((found - wanted).norm() / wanted.norm())


@native
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 96, 128, 256])
def test_it_is_the_attention_over_rounded_keys_and_values(dim: int, tmp_path: Path) -> None:
    """Heads of every width give the logits of the model's own code over rounded keys and values, but for values on the
    edge of two levels and the rounding of queries and weights to fourteen bits."""
    loaded = loaded_model(MODELS["qwen3"](dim), tmp_path)
    tokens = np.random.default_rng(1).integers(0, 131, 200)
    rounded = rounded_of(loaded, tokens)
    exact = logits_of(loaded, tokens, [200], dtype=torch.float32)
    found = found_of(loaded, tokens, [70, 199, 200])
    assert distance(found, rounded) < 1e-3
    assert 4 * distance(found, rounded) < distance(found, exact) < 0.02


@native
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dim", [64, 96])
def test_a_dimension_of_keys_that_is_far_above_the_others_costs_little(dim: int, tmp_path: Path) -> None:
    """Two dimensions of each KV head that are 30 times as large in keys, and a 30th in queries, cost little accuracy.
    Without the rotation the other dimensions would have four levels left."""
    factor, model = 30.0, make_model(tf.LlamaConfig(**WIDE | {"initializer_range": 0.2}, head_dim=dim))
    tokens = np.random.default_rng(1).integers(0, 131, 200)
    loaded = load_model(save_bundle(model, tmp_path / "as it was"), EngineSettings(**INT8_KV))
    exact = logits_of(loaded, tokens, [200], dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            for weight, by in ((layer.self_attn.k_proj.weight, factor), (layer.self_attn.q_proj.weight, 1 / factor)):
                weight.view(-1, dim, weight.shape[1])[:, [3, 3 + dim // 2]] *= by
    scaled = load_model(save_bundle(model, tmp_path / "scaled"), EngineSettings(**INT8_KV))
    assert distance(logits_of(scaled, tokens, [200], dtype=torch.float32), exact) < 1e-4
    unmixed = rounded_of(scaled, tokens, mixed=False)
    assert 3 * distance(found_of(scaled, tokens, [200]), exact) < distance(unmixed, exact)


@native
def test_values_that_are_not_finite_are_not_hidden(tmp_path: Path) -> None:
    """A prompt vector that is not finite leaves no finite logits: int8 has no NaN, but the scales do."""
    loaded = loaded_model(MODELS["qwen3"](), tmp_path)
    with torch.inference_mode():
        loaded.decoder.embedding[5] = float("nan")
    found = found_of(loaded, np.array([7, 5, *range(8, 80)]), [74])
    assert found[0].isfinite().all()
    assert found[1:].isnan().any(-1).all()


def core_of(tmp_path: Path, **settings: Any) -> EngineCore:
    bundle = save_bundle(make_model(MODELS["qwen3"](64)), tmp_path)
    return EngineCore(bundle, EngineSettings(**INT8_KV | settings))


@native
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"quantization": "int8"},
        pytest.param(
            {"dtype": "bfloat16"},
            marks=pytest.mark.skipif(not has_bf16(), reason="a CPU without AVX-512 BF16"),
        ),
    ],
    ids=["float32", "int8", "bfloat16"],
)
def test_prefixes_beams_and_drafts_leave_texts_as_they_are(settings: dict[str, Any], tmp_path: Path) -> None:
    """With weights of every kind, a prefix that ends within a block, forks of beams and drafted tokens leave texts as
    they are alone."""
    prompt = prompt_of(75, 3)
    asked = [
        request_of("whole", prompt, max_tokens=9, logprobs=2),
        request_of("branch", prompt[:41] + prompt_of(30, 4), max_tokens=9, logprobs=2),
        request_of("repeating", prompt[:5] * 9, max_tokens=30, logprobs=1, temperature=0.7),
        request_of("beams", prompt[:50], max_tokens=12, beams=Beams(width=4), n=2),
    ]
    core = core_of(tmp_path, **settings, prefix_caching=False, speculation="none")
    assert (core.info.kernels, core.info.kv_cache_dtype) == ("native", "int8")
    alone = {}
    for request in asked:
        alone |= run(core, request)
    core.close()
    core = core_of(tmp_path, **settings, max_num_batched_tokens=48)
    run(core, request_of("first", prompt, max_tokens=2))
    together, warm = run(core, *asked), run(core, *asked)
    core.close()
    for request in asked:
        name = request.request_id
        for found in (together[name], warm[name]):
            assert found.tokens == alone[name].tokens
            assert found.logprobs == alone[name].logprobs


@native
def test_the_same_memory_keeps_nearly_four_times_as_much(tmp_path: Path) -> None:
    """The same memory in bytes, scales included, holds nearly four times as many tokens."""
    totals = []
    for kind in ("auto", "int8"):
        core = core_of(tmp_path, kv_cache_dtype=kind)
        totals.append(core.health().kv_tokens_total)
        core.close()
    assert totals[1] == (1 << 25) // (2 * 2 * 2 * (64 + 4))
    assert totals[1] == pytest.approx(totals[0] * 4 * 64 / (64 + 4), abs=1)


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        (MODELS["qwen3"], {"kernels": "torch"}, "the setting kernels is 'torch'"),
        (MODELS["qwen3"], {"dtype": "float16"}, "dtype is float16"),
        (lambda: tf.CohereConfig(**WIDE), {"dtype": "bfloat16"}, "does not support its architecture"),
        (lambda: tf.DeepseekV3Config(**LATENT), {}, "does not support its architecture"),
        (lambda: tf.LlamaConfig(**WIDE | {"num_attention_heads": 8}), {}, "heads of 8"),
    ],
)
@native
def test_an_unsupported_int8_cache_is_refused(config: Any, settings: Any, reason: str, tmp_path: Path) -> None:
    """An int8 cache is refused by name and with the reason for other kernels, dtypes, latent attention and heads."""
    with pytest.raises(PackagingError, match=f"kv_cache_dtype: 'int8' is not allowed; expected 'auto': .*{reason}"):
        loaded_model(config(), tmp_path, **settings)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_an_encoder_refuses_the_setting(kind: str, tmp_path: Path) -> None:
    """An encoder, which has no KV cache, refuses the setting."""
    sizes = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    bundle = save_bundle(tf.BertModel(tf.BertConfig(**sizes, num_attention_heads=2)), tmp_path)
    bundle = msgspec.structs.replace(bundle, tasks=("embeddings",))
    with pytest.raises(PackagingError, match=f"kv_cache_dtype: '{kind}' is not allowed; expected 'auto'"):
        EngineCore(bundle, EngineSettings(kv_cache_dtype=kind))  # type: ignore[arg-type]


def kept_in(folder: Path, config: Any = MODELS["qwen3"], **settings: Any) -> tuple[Any, bool]:
    """Return the dtype of keys and values, and whether the step is native."""
    loaded = load_model(save_bundle(make_model(config()), folder), EngineSettings(**settings))
    return loaded.kept["dtype"], loaded.decoder is not None


@native
@pytest.mark.usefixtures("instructions")
def test_beside_quantised_weights_it_is_the_default(tmp_path: Path) -> None:
    """An int8 cache is the default with quantised weights and native kernels; an explicit setting overrides it."""
    assert kept_in(tmp_path / "int8", quantization="int8") == (torch.int8, True)
    assert kept_in(tmp_path / "asked", quantization="int8", kv_cache_dtype="float32") == (torch.float32, True)
    assert kept_in(tmp_path / "plain") == (torch.float32, True)
    assert kept_in(tmp_path / "torch", quantization="int8", kernels="torch") == (torch.float32, False)
    assert kept_in(tmp_path / "heads of 16", lambda: tf.LlamaConfig(**WIDE), quantization="int8") == (torch.int8, True)


@native
def test_a_default_that_the_self_test_refuses_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An int8 cache by default that fails the self-test is dropped and the step stays native; by setting it is an
    error."""
    check = SelfTest.check

    def refuse(self: SelfTest, *args: Any, kept: Any = None, **more: Any) -> None:
        if kept is INT8_LAYOUT:
            raise PackagingError("in the self-test logits differ")
        check(self, *args, kept=kept, **more)

    monkeypatch.setattr(SelfTest, "check", refuse)
    assert kept_in(tmp_path / "default", quantization="int8") == (torch.float32, True)
    assert "keys and values are not kept in int8: in the self-test logits differ" in caplog.text
    with pytest.raises(PackagingError, match=r"kv_cache_dtype: 'int8' is not allowed.*logits differ"):
        kept_in(tmp_path / "asked", quantization="int8", kv_cache_dtype="int8")
