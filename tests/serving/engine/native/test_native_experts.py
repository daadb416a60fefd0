"""Experts run natively: any router and any number of rows, with a reason for models that are not run so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from engine_runs import run
from tiny_models import COMMON, greedy, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.attention.kv_cache import PrefixKey, Row
from mlflow_llm.serving.engine.attention.slot_cache import SlotKVCache
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.models.loader import load_model
from mlflow_llm.serving.engine.models.native_decoder import NativeDecoder
from mlflow_llm.serving.engine.models.step_input import StepInput
from mlflow_llm.serving.engine.models.verification import Forward, model_forward
from mlflow_llm.serving.engine.native import library
from mlflow_llm.serving.engine.weights.experts import EngineExperts
from mlflow_llm.serving.engine.weights.quantization import Int8Weight
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings

pytestmark = pytest.mark.skipif(library.library() is None, reason="the native kernels are not here")

WIDE: dict[str, Any] = COMMON | {"hidden_size": 64}
MANY: dict[str, Any] = WIDE | {"num_experts": 20, "num_experts_per_tok": 5, "moe_intermediate_size": 48}
TOKENS = np.random.default_rng(0).integers(0, 131, 120)


@pytest.fixture(autouse=True)
def threads_and_tiles() -> Iterator[None]:
    before, used = library.num_native_threads(), library.tiles()
    yield
    library.use_threads(before)
    library.use_tiles(used)


def loaded_model(config: Any, folder: Path, **settings: Any) -> Any:
    return load_model(save_bundle(make_model(config), folder), EngineSettings(**settings))


def logits_of(loaded: Any, forward: Forward | None = None, cuts: Sequence[int] = (120,), beside: int = 0) -> Any:
    """Return logits of every token, in chunks that end at ``cuts``, by the native step or by ``forward``."""
    cache = SlotKVCache(loaded.layers, num_slots=beside + 1, num_tokens=4096, max_model_len=256, dtype=torch.float32)
    decoder = NativeDecoder(loaded.decoder, cache)
    for owner in range(beside + 1):
        cache.acquire(owner, PrefixKey("", ""), TOKENS.astype(np.int32), at_most=0)
    found, start = [], 0
    for number, end in enumerate(cuts):
        others = [np.full(2, 5 + i) for i in range(beside)]
        ids = np.concatenate([*others, TOKENS[start:end]]).astype(np.int64)
        rows = [Row(1 + i, 2 * number, 2) for i in range(beside)] + [Row(0, start, end - start)]
        with torch.inference_mode():
            if forward is not None:
                every = forward(cache, ids, rows)
            else:
                every = decoder.forward(StepInput(ids, rows, [None] * len(rows), range(len(ids))))
        found.append(every[len(ids) - (end - start) :].clone())
        start = end
    return torch.cat(found)


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}], ids=["float32", "int8"])
def test_a_step_is_the_models_own_code_over_the_same_experts(settings: dict[str, str], tmp_path: Path) -> None:
    """transformers' router over single native experts gives the logits of the native step, for nearly all tokens up to
    rounding: sums in another order may round differently or choose another expert."""
    loaded = loaded_model(tf.Qwen2MoeConfig(**MANY, shared_expert_intermediate_size=80), tmp_path, **settings)
    own = logits_of(loaded, model_forward(loaded.model, loaded.holder))
    apart = (logits_of(loaded) - own).norm(dim=-1) / own.norm(dim=-1)
    assert float(apart.quantile(0.8)) < 1e-3


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_tiles_threads_and_neighbours_change_no_bit(settings: dict[str, str], tmp_path: Path) -> None:
    """With twenty experts, five per token, expert groups of no row, one, and more than a tile have the same bits."""
    if "dtype" in settings and not library.has_bf16():
        pytest.skip("a CPU without AVX512-BF16")
    for tiles in (library.NO_TILES, library.AMX, library.EMULATED_TILES):
        if library.use_tiles(tiles) != tiles or (tiles == library.EMULATED_TILES and not settings):
            continue
        loaded = loaded_model(tf.Qwen3MoeConfig(**MANY, head_dim=16, norm_topk_prob=True), tmp_path, **settings)
        library.use_threads(2)
        whole = logits_of(loaded)
        for count, cuts, beside in ((1, (1, 2, 50, 119, 120), 3), (3, (64, 120), 1), (2, (119, 120), 0)):
            library.use_threads(count)
            assert torch.equal(logits_of(loaded, cuts=cuts, beside=beside), whole)


@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (3, 3), (33, 1)])
def test_one_expert_all_of_them_and_one_of_many(experts: int, chosen: int, tmp_path: Path) -> None:
    """Texts equal ``generate()``'s for one expert, for all of them chosen and for one of many."""
    model = make_model(tf.MixtralConfig(**WIDE, num_local_experts=experts, num_experts_per_tok=chosen))
    core = EngineCore(save_bundle(model, tmp_path), EngineSettings(kv_cache_memory=1 << 22, max_num_seqs=4))
    prompts = {str(n): prompt_of(n, n) for n in (1, 9, 30)}
    found = run(core, *(request_of(name, prompt, max_tokens=6) for name, prompt in prompts.items()))
    assert core.info.kernels == "native"
    assert {name: found[name].tokens[0] for name in prompts} == {n: greedy(model, p, 6) for n, p in prompts.items()}
    core.close()


@pytest.mark.parametrize(("experts", "said"), [(3, 1), (4, 4), (2, 2)])
def test_phimoe_always_chooses_two_experts(experts: int, said: int, tmp_path: Path) -> None:
    """Phi-MoE's router chooses two experts whatever its configuration says; logits are those of its own code."""
    config = tf.PhimoeConfig(**WIDE, num_local_experts=experts, num_experts_per_tok=said)
    loaded = loaded_model(config, tmp_path)
    own = logits_of(loaded, model_forward(loaded.model, loaded.holder))
    apart = (logits_of(loaded) - own).norm(dim=-1) / own.norm(dim=-1)
    assert float(apart.quantile(0.8)) < 1e-3


def test_a_window_that_layers_do_not_pass_is_refused(tmp_path: Path) -> None:
    """Phi-MoE with a sliding window is refused: its mask has the window, but its attention is not given it."""
    config = tf.PhimoeConfig(**WIDE, num_local_experts=4, sliding_window=37)
    with pytest.raises(PackagingError, match="do not pass their window of 37"):
        loaded_model(config, tmp_path)


def test_unsupported_experts_report_the_reason(tmp_path: Path) -> None:
    """Clipped queries and experts that the kernels cannot take are reported with the reason; experts stay packed."""
    olmoe = {"num_experts": 4, "num_experts_per_tok": 2}
    loaded = loaded_model(tf.OlmoeConfig(**WIDE, **olmoe, clip_qkv=8.0), tmp_path / "clipped")
    assert "it clips queries" in loaded.kernels_reason
    assert isinstance(loaded.model.model.layers[0].mlp.experts, EngineExperts)
    loaded = loaded_model(tf.OlmoeConfig(**WIDE | {"intermediate_size": 40}, **olmoe), tmp_path / "narrow")
    assert "not multiples of 16" in loaded.kernels_reason
    config = tf.OlmoeConfig(**WIDE, **olmoe)
    assert loaded_model(config, tmp_path / "torch", kernels="torch").linears.experts == {}
    int8 = loaded_model(config, tmp_path / "int8", kernels="torch", quantization="int8").linears.packed
    assert {type(one) for name, one in int8.items() if "experts" in name} == {Int8Weight}
