"""The native kernels and the native decoder step."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from engine_runs import run
from tiny_models import COMMON, greedy, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.attention.kv_cache import PrefixKey, Row
from mlflow_llm.serving.engine.attention.slot_cache import SlotKVCache
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.forward.runner import ModelForward
from mlflow_llm.serving.engine.models.embedder import load_embedder
from mlflow_llm.serving.engine.models.loader import load_model
from mlflow_llm.serving.engine.models.native_decoder import NativeDecoder
from mlflow_llm.serving.engine.models.step_input import StepInput
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
from mlflow_llm.serving.engine.native.sampler import draw as native_draw
from mlflow_llm.serving.engine.native.sampler import largest
from mlflow_llm.serving.engine.native.weight import BF16, F32, INT8, ROTATED, NativeWeight, can_pack
from mlflow_llm.serving.engine.sampling.randomness import exponentials
from mlflow_llm.serving.engine.sampling.sampler import draw_tokens, sample
from mlflow_llm.serving.engine.weights import linear
from mlflow_llm.serving.engine.weights.quantization import Int8Weight
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.constraint import Grammar
from mlflow_llm.serving.interface.request import Sampling
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.interface.stop_rule import StopRule

on_each_instruction_set = pytest.mark.usefixtures("instructions")
pytestmark = pytest.mark.skipif(library() is None, reason="no compiler, or a CPU without AVX2")

WIDE: dict[str, Any] = COMMON | {"hidden_size": 64, "max_position_embeddings": 2048}  # heads of 16, as the kernels take
DECODERS = {
    "llama": lambda: tf.LlamaConfig(**WIDE),
    "llama_bias": lambda: tf.LlamaConfig(**WIDE, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: tf.Qwen2Config(**WIDE),
    "qwen3": lambda: tf.Qwen3Config(**WIDE, head_dim=32),
    "mistral": lambda: tf.MistralConfig(**WIDE, sliding_window=37),
}


@pytest.fixture(autouse=True)
def threads_and_tiles_as_before() -> Iterator[None]:
    before, used = num_native_threads(), tiles()
    use_threads(2)
    yield
    use_threads(before)
    use_tiles(used)


# -- linears ----------------------------------------------------------------------------------------------------------


@on_each_instruction_set
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(16, 16), (100, 48), (33, 576), (960, 64)])
@pytest.mark.parametrize("rows", [1, 5, 12, 13, 130])
def test_float32_equals_torch(rows: int, shape: tuple[int, int], bias: bool) -> None:
    """A float32 product is torch's, for any number of rows and outputs."""
    torch.manual_seed(1)
    weight, offset, x = torch.randn(shape), torch.randn(shape[0]) if bias else None, torch.randn(rows, shape[1])
    packed = NativeWeight(weight, offset)
    assert torch.allclose(packed.matmul(x), F.linear(x, weight, offset), atol=2e-4)
    assert torch.equal(packed.dense(), weight)


@on_each_instruction_set
@pytest.mark.parametrize("rows", [1, 13, 130])
def test_int8_equals_the_other_int8(rows: int) -> None:
    """An int8 product is bitwise that of ``Int8Weight``: the same scales, exact sums."""
    torch.manual_seed(2)
    weight, bias, x = torch.randn(100, 192), torch.randn(100), torch.randn(rows, 192)
    x[0] = 0.0
    packed, other = NativeWeight(weight, bias, INT8), Int8Weight(weight, bias, is_rotated=False)
    assert torch.equal(packed.matmul(x), other.matmul(x))
    assert torch.equal(packed.dense(), other.dense())


@on_each_instruction_set
@pytest.mark.parametrize("has_factors", [False, True])
@pytest.mark.parametrize("width", [16, 96, 192, 384, 640, 1536, 2048, 4096])
def test_rotated_int8_equals_the_other(width: int, has_factors: bool) -> None:
    """A rotated int8 product is bitwise that of ``Int8Weight``, made from floats or from stored weights, with factors
    of the inputs and without."""
    torch.manual_seed(2)
    weight, bias, x = torch.randn(100, width), torch.randn(100), torch.randn(13, width)
    x[0] = 0.0
    inputs = torch.rand(width) + 0.3 if has_factors else None
    packed, other = NativeWeight(weight, bias, ROTATED, inputs), Int8Weight(weight, bias, inputs=inputs)
    assert torch.equal(packed.dense(), other.dense())
    assert torch.allclose(packed.dense(), weight, atol=0.1)
    found = packed.matmul(x)
    assert torch.equal(other.matmul(x), found)
    stored = NativeWeight.of_int8(other.values, other.scale, bias, is_rotated=True, inputs=inputs)
    assert torch.equal(stored.matmul(x), found)
    mapped = NativeWeight.over((100, width), ROTATED, stored.parts())
    assert torch.equal(mapped.matmul(x), found)


@pytest.mark.parametrize("use", [AMX, EMULATED_TILES])
@pytest.mark.parametrize("width", [64, 80, 576])  # 80 is no multiple of a tile's row
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 130, 200])
@pytest.mark.parametrize("kind", [INT8, ROTATED])
def test_tiles_change_no_bit(kind: int, rows: int, width: int, use: int) -> None:
    """int8 products by tiles, the CPU's own or emulated, are bitwise those without them, for any number of rows."""
    if use == AMX and use_tiles(AMX) != AMX:
        pytest.skip("a CPU without AMX; the emulated tiles run the same code")
    torch.manual_seed(7)
    packed, x = NativeWeight(torch.randn(100, width), torch.randn(100), kind), torch.randn(rows, width)
    x[0] = 0.0
    assert use_tiles(NO_TILES) == NO_TILES
    plain = packed.matmul(x)
    assert use_tiles(use) == use
    assert torch.equal(packed.matmul(x), plain)


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Return each row times Sylvester's Hadamard matrix of the largest power of two that divides its width,
    orthonormal."""
    order, x = x.shape[-1] & -x.shape[-1], x.double()
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (x.reshape(*x.shape[:-1], -1, order) @ matrix).reshape(x.shape) / order**0.5


@on_each_instruction_set
@pytest.mark.parametrize("width", [16, 192, 4096])
@pytest.mark.parametrize("rows", [1, 2, 7, 45])
def test_rotated_int8_is_int8_of_hadamard_rotated_factors(rows: int, width: int) -> None:
    """Rotating both factors keeps their product, and an outlier leaves the other activations their levels."""
    torch.manual_seed(8)
    weight, bias, x = torch.randn(100, width), torch.randn(100), torch.randn(rows, width)
    x[:, ::16] *= 40.0
    packed, plain = NativeWeight(weight, bias, ROTATED), NativeWeight(weight, bias, INT8)
    mixed_weight = NativeWeight(mixed(weight).float(), bias, INT8)
    found = packed.matmul(x)
    reference = mixed_weight.matmul(mixed(x).float())
    assert (found - reference).norm() < 2e-3 * reference.norm()  # one that is rounded the other way makes no difference
    torch.testing.assert_close(mixed(packed.dense()).float(), mixed_weight.dense(), rtol=1e-4, atol=1e-5)
    dense = packed.dense().double()
    step = mixed(x).abs().amax(1, keepdim=True) / 127
    exact = F.linear(x.double(), dense, bias.double())
    furthest = step / 2 * mixed(dense).abs().sum(1) + 1e-5 * exact.abs().amax(1, keepdim=True)
    assert ((found - exact).abs() <= furthest).all()
    unrounded = F.linear(x.double(), weight.double(), bias.double())
    assert (found - unrounded).norm() < 0.8 * (plain.matmul(x) - unrounded).norm()


@on_each_instruction_set
def test_bfloat16_rounds_both_sides() -> None:
    """A bfloat16 product is the float32 product of the rounded factors."""
    if not has_bf16():
        pytest.skip("a CPU with AVX-512 that lacks BF16")
    torch.manual_seed(3)
    weight, x = torch.randn(100, 192), torch.randn(7, 192)
    packed = NativeWeight(weight, None, BF16)
    rounded = F.linear(x.bfloat16().float(), weight.bfloat16().float())
    assert torch.allclose(packed.matmul(x), rounded, atol=1e-4)
    assert torch.equal(packed.dense(), weight.bfloat16().float())


@on_each_instruction_set
@pytest.mark.parametrize("kind", [F32, INT8, BF16, ROTATED])
def test_a_row_alone_is_bitwise_the_row_in_a_batch(kind: int) -> None:
    """No result depends on the other rows or on the number of threads."""
    torch.manual_seed(4)
    packed, x = NativeWeight(torch.randn(200, 576), torch.randn(200), kind), torch.randn(45, 576)
    together = packed.matmul(x)
    use_threads(1)
    assert torch.equal(packed.matmul(x), together)
    for row in (0, 11, 44):
        assert torch.equal(packed.matmul(x[row : row + 1])[0], together[row])


@on_each_instruction_set
@pytest.mark.parametrize("kind", [F32, INT8, BF16, ROTATED])
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_stay_in_their_row(kind: int, strange: float) -> None:
    """A row with NaN or infinity gives nothing finite, and the rows beside it are untouched."""
    torch.manual_seed(5)
    packed, x = NativeWeight(torch.randn(40, 64), None, kind), torch.randn(3, 64)
    clean = packed.matmul(x)
    x[1, 17] = strange
    y = packed.matmul(x)
    assert not torch.isfinite(y[1]).any()
    assert torch.equal(y[0], clean[0])
    assert torch.equal(y[2], clean[2])


def test_shapes_and_types_the_kernels_refuse() -> None:
    """Unsupported widths, dtypes and devices are left to torch."""
    assert can_pack(torch.zeros(3, 32))
    assert not can_pack(torch.zeros(3, 40))
    assert not can_pack(torch.zeros(3, 32, dtype=torch.bfloat16))
    assert not can_pack(torch.zeros(3, 32, device="meta"))


def test_the_setting_leaves_the_kernels_out() -> None:
    """``kernels="torch"`` packs nothing natively, "auto" everything that fits."""
    for settings, kinds in (
        (EngineSettings(kernels="torch"), {None}),
        (EngineSettings(), {F32}),
        (EngineSettings(quantization="int8"), {ROTATED}),
    ):
        model = make_model(DECODERS["llama"]())
        found = linear.install(model, linear.ContextHolder(), settings).linears.values()
        assert {getattr(each.group.packed, "kind", None) for each in found} == kinds


# -- the decoder ------------------------------------------------------------------------------------------------------


def multiplies_bf16() -> bool:
    found = library()
    return found is not None and bool(found.mlflow_llm_can_attend_bf16(64) & 2)


def core_of(directory: Path, name: str, **settings: Any) -> EngineCore:
    bundle = save_bundle(make_model(DECODERS[name]()), directory)
    return EngineCore(bundle, EngineSettings(**{"kv_cache_memory": 1 << 26, **settings}))


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_generates_what_generate_does(name: str, tmp_path: Path) -> None:
    """Chunked prompts and decodes mixed, with long contexts too, give the tokens of transformers' greedy
    ``generate``."""
    model = make_model(DECODERS[name]())
    core = core_of(tmp_path, name, max_num_batched_tokens=100)
    assert isinstance(core.parts.runner.step_forward, NativeDecoder)
    assert core.info.kernels == "native"
    prompts = {str(n): prompt_of(n, n) for n in (1, 7, 64, 130, 700)}
    found = run(core, *(request_of(name, prompt, max_tokens=9) for name, prompt in prompts.items()))
    core.close()
    for name, prompt in prompts.items():
        assert found[name].tokens[0] == greedy(model, prompt, 9)


def logits_of(loaded: Any, tokens: Any, cuts: list[int], beside: int, threads: int) -> Any:
    """Return logits of every token, computed in chunks that end at ``cuts`` beside ``beside`` other sequences."""
    use_threads(threads)
    cache = SlotKVCache(loaded.layers, num_slots=beside + 1, num_tokens=8192, max_model_len=2048, dtype=torch.float32)
    decoder = NativeDecoder(loaded.decoder, cache)
    random = np.random.default_rng(beside)
    for owner in range(beside + 1):
        cache.acquire(owner, PrefixKey("", ""), tokens.astype(np.int32), at_most=0)
    rows, start = [], 0
    for end in cuts:
        others = [random.integers(0, 131, 3) for _ in range(beside)]
        ids = np.concatenate([*others, tokens[start:end]]).astype(np.int64)
        runs = [Row(1 + i, 3 * cuts.index(end), 3) for i in range(beside)] + [Row(0, start, end - start)]
        kept = range(len(ids) - (end - start), len(ids))
        rows.append(decoder.forward(StepInput(ids, runs, [None] * len(runs), kept)))
        start = end
    return torch.cat(rows)


@on_each_instruction_set
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_token_is_bitwise_the_same_however_it_was_computed(name: str, tmp_path: Path) -> None:
    """Chunks, neighbours and threads change no bit of one prefill of 1100 tokens or of parts of it with decodes at the
    end."""
    settings = EngineSettings(kv_cache_memory=1 << 26)
    loaded = load_model(save_bundle(make_model(DECODERS[name]()), tmp_path), settings)
    tokens = np.random.default_rng(0).integers(0, 131, 1100)
    whole = logits_of(loaded, tokens, [1100], beside=0, threads=2)
    for cuts, beside, threads in (
        ([5, 33, 512, 700, 1097, 1098, 1099, 1100], 0, 2),
        ([512, 1099, 1100], 3, 1),
        ([1, 2, 3, 1099, 1100], 2, 5),
    ):
        assert torch.equal(logits_of(loaded, tokens, cuts, beside, threads), whole)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_prompt_scores_bitwise_the_same_alone_and_in_a_batch(quantization: str, tmp_path: Path) -> None:
    """Log probabilities of a scored prompt are bitwise the same alone, beside others and with cached KV."""
    core = core_of(tmp_path, "llama", quantization=quantization, max_num_batched_tokens=64)
    assert core.info.kernels == "native"
    more = {"max_tokens": 0, "logprobs": 2, "prompt_logprobs": 2}
    requests = [request_of(str(n), prompt_of(n, n), **more) for n in (5, 37, 1, 130)]
    together = run(core, request_of("busy", prompt_of(30, 9)), *requests)
    for request in requests:
        assert run(core, request)[request.request_id].scored == together[request.request_id].scored
    core.close()


@on_each_instruction_set
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 256])
def test_heads_of_every_width(head_dim: int, tmp_path: Path) -> None:
    """Attention over few queries and over many gives the same bits for heads of every width, and the logits of the
    model's own code."""
    model = make_model(tf.Qwen3Config(**WIDE, head_dim=head_dim))
    loaded = load_model(save_bundle(model, tmp_path), EngineSettings(kv_cache_memory=1 << 26))
    tokens = np.random.default_rng(3).integers(0, 131, 70)
    whole = logits_of(loaded, tokens, [70], beside=0, threads=2)
    assert torch.equal(logits_of(loaded, tokens, [1, 2, 3, 33, 35, 69, 70], beside=1, threads=2), whole)
    with torch.inference_mode():
        expected = model(input_ids=torch.from_numpy(tokens)[None]).logits[0]
    assert torch.allclose(whole, expected, atol=1e-3)


def test_tiles_change_no_bit_of_a_decoder(tmp_path: Path) -> None:
    """int8 logits of a chunked prompt are the same with tiles, the CPU's own and emulated. Without them the bfloat16
    head rounds differently."""
    settings = EngineSettings(quantization="int8", kv_cache_memory=1 << 26)
    loaded = load_model(save_bundle(make_model(DECODERS["llama"]()), tmp_path), settings)
    tokens = np.random.default_rng(2).integers(0, 131, 75)
    use_tiles(NO_TILES)
    whole, by_tiles = logits_of(loaded, tokens, [75], beside=0, threads=2), []
    for use in (NO_TILES, EMULATED_TILES, AMX):
        used = use_tiles(use)
        assert used in (use, NO_TILES)
        found = logits_of(loaded, tokens, [1, 2, 40, 74, 75], beside=2, threads=3)
        assert torch.allclose(found, whole, atol=1e-4)
        if multiplies_bf16():
            by_tiles.append(found)
        else:
            assert torch.equal(found, whole)
    assert all(torch.equal(one, by_tiles[0]) for one in by_tiles)


@on_each_instruction_set
def test_int8_runs_as_with_torch(tmp_path: Path) -> None:
    """The int8 decoder and transformers' code over the same int8 linears differ by rounding alone."""
    bundle = save_bundle(make_model(DECODERS["llama"]()), tmp_path)
    loaded = load_model(bundle, EngineSettings(quantization="int8", kv_cache_memory=1 << 26))
    tokens = np.random.default_rng(1).integers(0, 131, 60)
    cache = SlotKVCache(loaded.layers, num_slots=2, num_tokens=512, max_model_len=256, dtype=torch.float32)
    cache.acquire(0, PrefixKey("", ""), tokens.astype(np.int32))
    cache.acquire(1, PrefixKey("", ""), tokens.astype(np.int32), at_most=0)
    native = NativeDecoder(loaded.decoder, cache).forward(StepInput(tokens, [Row(0, 0, 60)], [None], range(60)))
    with torch.inference_mode():
        model = ModelForward(loaded.model, loaded.holder, cache, None, loaded.device)
        plain = model.forward(StepInput(tokens, [Row(1, 0, 60)], [None], range(60)))
    # a value on the edge between two int8 levels may fall either way: most rows agree closely, none is far off
    distance = (native - plain).norm(dim=-1) / plain.norm(dim=-1)
    assert float(distance.median()) < 0.02
    assert float(distance.max()) < 0.2


@on_each_instruction_set
@pytest.mark.parametrize(("scale", "flat"), [(1.0, 1.0), (4.0, 1.0), (1.0, 0.01)])
def test_likely_tokens_have_the_logits_of_a_head_in_floats(scale: float, flat: float, tmp_path: Path) -> None:
    """A head in int8 that is tied to the embedding gives the most probable tokens the logits of its floats, alone and
    in a batch; the others, and all tokens of a head of its own, keep those of int8."""
    config = tf.GraniteConfig(**WIDE, tie_word_embeddings=True, logits_scaling=scale)
    config.vocab_size = 1001
    model = make_model(config)
    model.get_input_embeddings().weight.data *= 40 * flat * scale
    loaded = load_model(save_bundle(model, tmp_path), EngineSettings(quantization="int8", kv_cache_memory=1 << 26))
    weights = loaded.decoder
    assert weights is not None
    assert weights.tied
    head = NativeWeight(weights.embedding, None, F32)
    tokens = np.random.default_rng(1).integers(0, 1001, 40)

    def logits_by(decoder: Any, cuts: list[int]) -> torch.Tensor:
        return logits_of(SimpleNamespace(layers=loaded.layers, decoder=decoder), tokens, cuts, beside=0, threads=2)

    found, plain, exact = (
        logits_by(one, [40]) for one in (weights, replace(weights, tied=False), replace(weights, tied=False, head=head))
    )
    assert torch.equal(logits_by(weights, [5, 38, 39, 40]), found)
    widths = set()
    for row, by_bytes, by_floats in zip(found, plain, exact, strict=True):
        within = 5.0
        while (likely := by_bytes >= by_bytes.max() - within).sum() > 64:
            within /= 2
        widths.add(within)
        edge = (by_bytes - by_bytes.max() + within).abs() < 1e-4
        torch.testing.assert_close(row[likely | edge], torch.where(likely, by_floats, row)[likely | edge])
        assert torch.equal(row[~likely & ~edge], by_bytes[~likely & ~edge])
        assert not torch.equal(row, by_bytes)
    assert (5.0 in widths) == (flat == 1.0)
    own = make_model(tf.LlamaConfig(**WIDE))
    untied = load_model(save_bundle(own, tmp_path / "own"), EngineSettings(quantization="int8"))
    assert untied.decoder is not None
    assert not untied.decoder.tied


def test_unsupported_decoders_run_by_transformers(tmp_path: Path) -> None:
    """A decoder that the step does not support, and one whose heads the kernels do not take, run by transformers'
    code."""
    for config in (tf.CohereConfig(**WIDE), tf.LlamaConfig(**COMMON)):
        core = EngineCore(save_bundle(make_model(config), tmp_path), EngineSettings(kv_cache_memory=1 << 24))
        assert isinstance(core.parts.runner.step_forward, ModelForward)
        assert core.info.kernels == "torch"
        core.close()


# -- the encoder ------------------------------------------------------------------------------------------------------

ENCODER_SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 700, "initializer_range": 0.3,
}  # fmt: skip
ENCODERS = {
    "bert": lambda: tf.BertModel(tf.BertConfig(**ENCODER_SIZES)),
    "roberta": lambda: tf.RobertaModel(tf.RobertaConfig(**ENCODER_SIZES, pad_token_id=1)),
    "electra": lambda: tf.ElectraModel(tf.ElectraConfig(**ENCODER_SIZES, embedding_size=64)),
    "distilbert": lambda: tf.DistilBertModel(
        tf.DistilBertConfig(
            vocab_size=131, dim=64, hidden_dim=96, n_layers=2, n_heads=2, max_position_embeddings=700,
            initializer_range=0.3,
        )
    ),
    "mpnet": lambda: tf.MPNetModel(tf.MPNetConfig(**ENCODER_SIZES)),
    # every second layer looks a few tokens to both sides, and turns heads otherwise
    "modernbert": lambda: modernbert(),
    "modernbert_biases": lambda: modernbert(attention_bias=True, mlp_bias=True, norm_bias=True),
}  # fmt: skip


def modernbert(**more: Any) -> Any:
    sizes = ENCODER_SIZES | {"num_hidden_layers": 4, "pad_token_id": 0, "local_attention": 46}
    model = tf.ModernBertModel(
        tf.ModernBertConfig(**sizes, layer_types=["full_attention", "sliding_attention"] * 2, **more)
    )
    for parameter in model.parameters():  # as trained: not all norms are ones, not all biases zeros
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.5)
    return model


@on_each_instruction_set
def test_gelu_is_exact_to_float32() -> None:
    """The polynomial is exact to one rounding of a float32, and vanishes far below zero."""
    x = torch.cat([torch.linspace(-9, 9, 100_000), torch.tensor([-3e38, -0.0, 1e-30, 3e38] * 4)])
    y, found = torch.empty_like(x), library()
    assert found is not None
    found.mlflow_llm_gelu(x.data_ptr(), y.data_ptr(), len(x))
    exact = F.gelu(x.double())
    assert float(((y - exact).abs() / x.double().abs().clamp(min=1e-30)).max()) < 2e-7
    assert not y[x < -5.31].any()
    assert torch.equal(y[x > 5.31], x[x > 5.31])
    strange = torch.full((16,), float("nan"))
    found.mlflow_llm_gelu(strange.data_ptr(), strange.data_ptr(), 16)
    assert strange.isnan().all()


@on_each_instruction_set
@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_an_encoder_equals_the_model_itself(name: str, tmp_path: Path) -> None:
    """Hidden states of texts side by side equal those of each text alone, by transformers and bitwise by the native
    step."""
    torch.manual_seed(0)
    model = ENCODERS[name]().eval()
    model.save_pretrained(tmp_path)
    bundle = Bundle(content_hash="x", tasks=("embeddings",), model_dir=str(tmp_path), tokenizer_dir="")
    embedder = load_embedder(bundle, EngineSettings())
    texts = [[2 + (7 * i + n) % 120 for i in range(n)] for n in (1, 4, 33, 64, 600)]
    with torch.inference_mode():
        assert embedder.native is not None
        together = embedder.hidden(texts).split([len(text) for text in texts])
        for text, found in zip(texts, together, strict=True):
            alone = model(input_ids=torch.tensor([text])).last_hidden_state[0]
            assert torch.allclose(found, alone, atol=2e-4)
            assert torch.equal(embedder.hidden([text]), found)


def test_encoders_of_different_heads_in_one_process(tmp_path: Path) -> None:
    """Scratch memory that threads keep between calls does not affect an encoder with longer texts and narrower
    heads."""
    sizes = ENCODER_SIZES | {"max_position_embeddings": 1300}
    texts = {2: [[9] * 640], 4: [[7 + i % 99 for i in range(1280)]]}
    for heads in (2, 4):
        torch.manual_seed(0)
        model = tf.BertModel(tf.BertConfig(**sizes | {"num_attention_heads": heads})).eval()
        model.save_pretrained(tmp_path / str(heads))
        bundle = Bundle(content_hash="x", tasks=("embeddings",), model_dir=str(tmp_path / str(heads)), tokenizer_dir="")
        embedder = load_embedder(bundle, EngineSettings())
        assert embedder.native is not None
        with torch.inference_mode():
            alone = model(input_ids=torch.tensor(texts[heads])).last_hidden_state[0]
            assert torch.allclose(embedder.hidden(texts[heads]), alone, atol=2e-4)


def test_an_encoder_with_words_of_another_width_runs_by_its_own_code(tmp_path: Path) -> None:
    """An encoder with embeddings of another width, like ELECTRA's small models, runs by its own code with the
    reason."""
    config = tf.ElectraConfig(**ENCODER_SIZES, embedding_size=32)
    tf.ElectraModel(config).save_pretrained(tmp_path)
    bundle = Bundle(content_hash="x", tasks=("embeddings",), model_dir=str(tmp_path), tokenizer_dir="")
    embedder = load_embedder(bundle, EngineSettings())
    assert embedder.native is None
    assert "projected to another width" in embedder.info.kernels_reason


@on_each_instruction_set
@pytest.mark.parametrize(("name", "quantization"), [("bert", "none"), ("bert", "int8"), ("modernbert", "int8")])
def test_threads_and_neighbours_change_no_bit_of_a_text(name: str, quantization: str, tmp_path: Path) -> None:
    """Texts computed by groups of threads, by all threads together or by one have the same bits."""
    torch.manual_seed(0)
    ENCODERS[name]().save_pretrained(tmp_path)
    bundle = Bundle(content_hash="x", tasks=("embeddings",), model_dir=str(tmp_path), tokenizer_dir="")
    embedder = load_embedder(bundle, EngineSettings(quantization=quantization))
    assert embedder.native is not None
    texts = [[2 + (7 * i + 3 * n) % 120 for i in range(1 + 13 * n % 97)] for n in range(60)] + [[9] * 650]
    for threads in (2, 3, 5, 1):
        use_threads(threads)
        whole = embedder.hidden(texts).split([len(text) for text in texts])
        for n in (0, 7, 22, 60):
            assert torch.equal(embedder.hidden([texts[n]]), whole[n])
            assert torch.equal(embedder.hidden([texts[n], texts[3], texts[60]])[: len(texts[n])], whole[n])
        for use in (NO_TILES, EMULATED_TILES):
            before = tiles()
            use_tiles(use)
            assert torch.equal(embedder.hidden(texts[:9]), torch.cat(whole[:9]))
            use_tiles(before)
        if threads == 2:
            expected = torch.cat(whole)
        assert torch.equal(torch.cat(whole), expected)


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    """Tokens outside the vocabulary are refused, so the embedding table is never read beyond its ends."""
    ENCODERS["bert"]().save_pretrained(tmp_path)
    bundle = Bundle(content_hash="x", tasks=("embeddings",), model_dir=str(tmp_path), tokenizer_dir="")
    embedder = load_embedder(bundle, EngineSettings())
    for token in (-1, 131):
        with pytest.raises(IndexError, match=r"0\.\.130"):
            embedder.hidden([[5, token]])


# -- sampling ---------------------------------------------------------------------------------------------------------


@on_each_instruction_set
def test_exponential_times_equal_numpys_philox() -> None:
    """Exponential times equal numpy's Philox bits put through the same logarithm, to the last bits."""
    for seed, position in ((1, 0), (2**63 + 5, 77), (123456789, 4000)):
        times = torch.empty(1001)
        found = library()
        assert found is not None
        found.mlflow_llm_exponentials(seed, position, 1001, times.data_ptr())
        assert torch.allclose(times, exponentials([seed], [position], 1001)[0], rtol=1e-6, atol=0)


@on_each_instruction_set
@pytest.mark.parametrize("size", [1, 15, 16, 63, 64, 65, 200, 4099])
def test_argmax_equals_torchs(size: int) -> None:
    """The argmax equals torch's, the first of equals; it is -1 if any value is not finite."""
    logits = torch.randn(40, size, generator=torch.Generator().manual_seed(size))
    logits[:20] = torch.round(logits[:20])  # many are equal
    assert largest(logits) == [row.tolist().index(max(row.tolist())) for row in logits]
    assert largest(logits[:, : size // 2 + 1]) == logits[:, : size // 2 + 1].argmax(-1).tolist()
    for bad in (math.nan, math.inf, -math.inf):
        logits[1] = -math.inf
        logits[1, size - 1] = bad
        assert largest(logits)[:3:2] == logits[:3:2].argmax(-1).tolist()
        assert largest(logits)[1] == -1


@on_each_instruction_set
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.3},
        {"min_p": 0.05},
        {"top_k": 1},
        {"top_k": 7, "top_p": 0.8},
        {"top_k": 5000},
        {"top_p": 0.9},
        {"top_p": 0.001},
        {"top_p": 0.9999, "temperature": 2.0, "min_p": 0.001},
        {"typical_p": 0.9},
        {"typical_p": 0.001},
        {"typical_p": 0.99999, "temperature": 2.0},
        {"typical_p": 0.5, "min_p": 0.01},
        {"typical_p": 0.6, "top_k": 40, "top_p": 0.95},
    ],
)
@pytest.mark.parametrize("spread", [0.5, 3.0, 30.0])
def test_native_draws_equal_torchs(parameters: dict[str, Any], spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native sampler draws the same tokens as torch's, with any truncation."""
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, spread, (200, 997)).astype(np.float32))
    logits[:, 5] = float("-inf")
    sampling = [Sampling(**{"temperature": 1.0, "max_tokens": 9, **parameters})] * len(logits)
    seeds, positions = list(range(len(logits))), [17 * i for i in range(len(logits))]
    drawn = native_draw(logits, sampling, seeds, positions)
    sequences: Any = [
        SimpleNamespace(sampling=p, seed=s, num_tokens=n) for p, s, n in zip(sampling, seeds, positions, strict=True)
    ]
    monkeypatch.setattr("mlflow_llm.serving.engine.native.sampler.can_draw", lambda logits: False)
    kind = "truncated" if {"top_k", "top_p"} & set(parameters) else "whole"
    kind = "typical" if "typical_p" in parameters else kind
    assert drawn == draw_tokens(kind, logits.clone(), sequences)


@on_each_instruction_set
@pytest.mark.parametrize("share", [0.001, 0.1, 0.95])
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.0},
        {"min_p": 0.05},
        {"top_k": 7, "top_p": 0.8},
        {"top_p": 0.999},
        {"typical_p": 0.7},
        {"typical_p": 0.7, "top_k": 9},
    ],
)
def test_native_draws_within_masks_equal_torchs(
    parameters: dict[str, Any], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With masks that leave few tokens or most, the native sampler draws the tokens of torch's and none that is masked,
    beside rows without a mask."""
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(0, 3, (60, 997)).astype(np.float32))
    allowed = rng.random((60, 998)) < share
    allowed[:, 31] = True
    masks = np.packbits(np.pad(allowed, ((0, 0), (0, 26))), axis=1, bitorder="little").view(np.uint32)
    plain = Sampling(**{"temperature": 1.0, "max_tokens": 9, **parameters})
    held = msgspec.structs.replace(plain, grammar=Grammar(source="", field=""))
    sequences: Any = [
        SimpleNamespace(
            sampling=held if i % 4 else plain,
            stop_rule=StopRule(plain),
            seed=i,
            num_prompt=11 * i,
            num_tokens=11 * i,
            num_generated=0,
            grammar_state=SimpleNamespace(allowed=masks[i]) if i % 4 else None,
            processors=None,
        )
        for i in range(60)
    ]
    drawn = [one.token_id for one in sample(logits, sequences)]
    assert all(allowed[i, token] for i, token in enumerate(drawn) if i % 4)
    monkeypatch.setattr("mlflow_llm.serving.engine.native.sampler.can_draw", lambda logits: False)
    assert drawn == [one.token_id for one in sample(logits, sequences)]


def test_weights_outlive_all_that_runs_when_a_process_ends() -> None:
    """A thread that still reads weights to write the packed file does not crash the process at its end."""
    program = """if True:
        import atexit
        seen = []
        atexit.register(lambda: print(sum(seen[0].tobytes())))  # the last to run: after all finalizers
        import torch
        from mlflow_llm.serving.engine.native.weight import F32, NativeWeight
        weight = NativeWeight(torch.ones(2048, 2048), None, F32)
        seen.append(max(weight.parts().values(), key=len))
    """
    ended = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.strip()) == (0, str(2048 * 2048 * (0x3F + 0x80)))
