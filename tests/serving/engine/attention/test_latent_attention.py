"""Multi-head latent attention: only the latent of a token is cached, and every text stays the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from engine_runs import run
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, LATENT, MORE_FAMILIES, greedy, make_model, prompt_of, request_of, save_bundle
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from mlflow_llm.serving.engine.adapters.lora_plan import RowFactors
from mlflow_llm.serving.engine.attention import latent_attention
from mlflow_llm.serving.engine.attention.latent_attention import LatentForm, Projections
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.models.loader import load_model
from mlflow_llm.serving.engine.weights.linear import EngineLinear
from mlflow_llm.serving.engine.weights.quantization import Int8Weight
from mlflow_llm.serving.engine.weights.weight_layouts import PlainWeight
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.request import Beams
from mlflow_llm.serving.interface.settings import EngineSettings

# peft 0.21 reads a property that transformers 5.23 deprecates
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
KEPT = 16 + 8  # kv_lora_rank + qk_rope_head_dim
TOKEN_BYTES = 2 * KEPT * 4  # layers, float32
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "mscale": 0.7, "mscale_all_dim": 0.9,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "v2_whole_queries_yarn": lambda: tf.DeepseekV2Config(**LATENT | {"q_lora_rank": None}, rope_parameters=YARN),
    "v3_whole_queries_halves": lambda: tf.DeepseekV3Config(**LATENT | {"q_lora_rank": None}, rope_interleave=False),
    "v3_yarn_groups": lambda: tf.DeepseekV3Config(
        **LATENT | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "v_head_dim": 12}, rope_parameters=YARN
    ),
    "minicpm3": MORE_FAMILIES["minicpm3"],
}
MLA = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 3, "lora_alpha": 16, "target_modules": MLA},
    "dora": {"r": 2, "lora_alpha": 8, "use_dora": True, "target_modules": MLA},
    "shifted": {"r": 4, "lora_bias": True, "target_modules": ["kv_b_proj"]},
    "other": {"r": 2, "target_modules": ["o_proj"]},
}
PROMPTS = [prompt_of(n, seed) for seed, n in enumerate((1, 3, 40, 9, 23))]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(tf.DeepseekV3Config(**LATENT))


@pytest.fixture(scope="module")
def bundle(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return save_bundle(model, tmp_path_factory.mktemp("latent"))


@pytest.fixture
def make(bundle: Bundle) -> Iterator[Callable[..., EngineCore]]:
    cores: list[EngineCore] = []

    def build(**more: Any) -> EngineCore:
        settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_cache_memory": 1 << 20, **more}
        cores.append(EngineCore(bundle, EngineSettings(**settings)))
        return cores[-1]

    yield build
    for core in cores:
        core.check_integrity()
        core.close()


def texts(core: EngineCore, prompts: Any, **more: Any) -> list[list[int]]:
    found = run(core, *(request_of(str(i), prompt, **more) for i, prompt in enumerate(prompts)))
    return [found[str(i)].tokens[0] for i in range(len(prompts))]


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_equals_generate(name: str, tmp_path: Path) -> None:
    """Compressed queries or not, each rotation and yarn's scale give generate()'s tokens, chunked and in mixed
    batches."""
    model = make_model(CONFIGS[name]())
    settings = EngineSettings(max_num_seqs=4, max_num_batched_tokens=16, kv_cache_memory=1 << 24)
    core = EngineCore(save_bundle(model, tmp_path), settings)
    assert core.info.kv_cache_reason == ""
    assert texts(core, PROMPTS) == [greedy(model, prompt, 12) for prompt in PROMPTS]
    core.close()


def test_a_token_takes_the_latent_and_the_shared_key(bundle: Bundle, make: Callable[..., EngineCore]) -> None:
    """A token takes kv_lora_rank + qk_rope_head_dim numbers a layer, so more tokens fit into the same memory."""
    layers = load_model(bundle, EngineSettings()).layers
    assert [shape.elements_per_token for shape in layers] == [KEPT, KEPT]
    core = make(kv_cache_memory=100 * TOKEN_BYTES)
    assert core.info.max_kv_tokens == 100
    assert texts(core, [prompt_of(90, 1)], max_tokens=10)[0]


def test_memory_that_runs_out_and_prefixes_change_no_text(model: Any, make: Callable[..., EngineCore]) -> None:
    """Preempted sequences and prompts with common prefixes, warm and cold, have unchanged texts."""
    shared = prompt_of(20, 9)
    prompts = [(*shared, *prompt_of(n, n)) for n in (3, 5, 8, 2)]
    wanted = [greedy(model, prompt, 24) for prompt in prompts]
    core = make(kv_cache_memory=110 * TOKEN_BYTES)
    assert texts(core, prompts, max_tokens=24) == wanted
    assert core.parts.scheduler.num_preemptions > 0
    warm = make()
    for _ in range(2):
        assert texts(warm, prompts, max_tokens=24) == wanted
    found = run(warm, request_of("again", prompts[0], max_tokens=24))["again"]
    assert found.finished[0].num_cached_tokens >= len(shared)


@torch.inference_mode()
def test_beams_are_those_of_generate(model: Any, make: Callable[..., EngineCore]) -> None:
    """Beam searches over the latent cache give generate()'s texts."""
    prompt = prompt_of(19, 4)
    ids = torch.tensor([prompt])
    wanted = model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=3, num_return_sequences=3, eos_token_id=None,
        pad_token_id=0, max_new_tokens=10, do_sample=False,
    )  # fmt: skip
    search = request_of("search", prompt, n=3, max_tokens=10, beams=Beams(width=3))
    found = run(make(), search, request_of("beside", prompt_of(30, 2)))["search"]
    assert [found.tokens[i] for i in range(3)] == wanted[:, len(prompt) :].tolist()


def test_batch_invariant(make: Callable[..., EngineCore]) -> None:
    """With batch_invariant, log probabilities are bitwise the same alone and among others, whatever the chunks."""
    asked = {"max_tokens": 6, "logprobs": 2, "prompt_logprobs": 1}
    seen = []
    for budget, others in ((16, 0), (512, 3), (24, 4)):
        core = make(batch_invariant=True, max_num_batched_tokens=budget)
        beside = [request_of(f"other{i}", prompt_of(7 + 20 * i, i)) for i in range(others)]
        found = run(core, *beside, request_of("needle", prompt_of(150, 3), **asked))["needle"]
        seen.append((found.tokens[0], found.logprobs[0], found.scored[0]))
    assert seen[0] == seen[1] == seen[2]


def adapted(name: str) -> Any:
    torch.manual_seed(sorted(ADAPTERS).index(name))
    config = LoraConfig(init_lora_weights=False, **ADAPTERS[name])
    peft = get_peft_model(make_model(tf.DeepseekV3Config(**LATENT)), config).eval()
    with torch.no_grad():
        for part, parameter in peft.named_parameters():
            if "magnitude" in part:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
    return peft


@pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning")
def test_adapters_on_every_projection(model: Any, make: Callable[..., EngineCore], tmp_path: Path) -> None:
    """Adapters on every projection, the absorbed one included, with magnitudes and biases, give peft's texts in one
    batch."""
    core = make(max_num_seqs=10)
    prompt = prompt_of(21, 3)
    wanted = {None: greedy(model, prompt, 8)}
    for name in ADAPTERS:
        peft = adapted(name)
        peft.save_pretrained(tmp_path / name)
        core.load_adapter(name, str(tmp_path / name))
        wanted[name] = greedy(peft, prompt, 8)
    assert len({tuple(text) for text in wanted.values()}) == len(wanted)
    order = [*wanted, *reversed(wanted)]
    found = run(core, *(request_of(str(i), prompt, max_tokens=8, adapter=name) for i, name in enumerate(order)))
    assert [found[str(i)].tokens[0] for i in range(len(order))] == [wanted[name] for name in order]


@torch.inference_mode()
def test_absorbed_and_expanded_attention_agree(model: Any) -> None:
    """Absorbed and expanded attention agree, with adapters of either kind on some rows, whole and in parts."""
    form = LatentForm.of(model.model.layers[0].self_attn)
    heads, outputs = form.weight.shape[0], form.weight.shape[0] * form.weight.shape[1]
    make = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    form = LatentForm(form.weight.double(), form.rank, form.nope, form.rope, form.value_dim)
    kept, q = random(11, KEPT), random(heads, 3, form.nope + form.rope)
    for more in ({}, {"gain": random(outputs), "shift": random(outputs)}):
        own = RowFactors(torch.tensor([4, 5, 6, 9]), random(form.rank, 2), random(2, outputs), 0.5, **more)
        for first in (0, 4):  # rows that the adapter has not, and those that it has
            projections = Projections(form, [own])
            parts = torch.softmax(projections.absorbed(q, first) @ kept.T, -1)
            absorbed = projections.values((parts @ kept).transpose(0, 1), first)
            turns = [projections.expanded(kept, first, slice(i, i + 3)) for i in range(0, heads, 3)]
            keys, values = (torch.cat(each) for each in zip(*turns, strict=True))
            whole = (torch.softmax(q @ keys.transpose(1, 2), -1) @ values)[..., : form.value_dim].transpose(0, 1)
            torch.testing.assert_close(absorbed, whole)


def test_the_cheaper_form_follows_from_length_and_position() -> None:
    """A single query is absorbed and a whole prompt expanded, with the widths of DeepSeek V2 and V3."""
    form = LatentForm(torch.empty(128, 256, 512, device="meta"), 512, 128, 64, 128)
    assert not form.prefers_expanded(1, 4000)
    assert form.prefers_expanded(2000, 2000)
    assert (form.prefers_expanded(64, 4000), form.prefers_expanded(512, 4000)) == (False, True)
    groups = list(Projections(form, ()).head_groups(4000))
    assert [head for group in groups for head in range(128)[group]] == list(range(128))
    assert len(groups) > 1


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_int8(bundle: Bundle, kernels: str) -> None:
    """With int8 the absorbed projection stays in floats while the other linears are quantised."""
    settings = EngineSettings(kernels=kernels, quantization="int8", kv_cache_memory=1 << 20)
    loaded = load_model(bundle, settings)
    linears = {name.rpartition(".")[2]: one for name, one in loaded.linears.linears.items() if ".0.self_attn." in name}
    assert isinstance(linears["kv_b_proj"].group.packed, PlainWeight)
    attention = loaded.model.model.layers[0].self_attn
    form = getattr(attention, latent_attention.FORM)
    assert isinstance(attention.kv_b_proj, EngineLinear)
    assert form.weight.data_ptr() == attention.kv_b_proj.weight.data_ptr()
    if kernels == "torch":
        assert isinstance(linears["o_proj"].group.packed, Int8Weight)
    core = EngineCore(bundle, settings)
    assert texts(core, PROMPTS) == [texts(core, [prompt])[0] for prompt in PROMPTS]
    core.close()


@pytest.mark.parametrize("how", ["keys", "capped"])
def test_another_form_keeps_whole_keys_and_says_so(
    how: str, model: Any, bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A module that expands the latent in another way runs by its own code, and the reason is logged and reported."""
    expand, forward = DeepseekV3Attention.expand_kv, DeepseekV3Attention.forward
    if how == "keys":

        def double(self: Any, latent: Any, rotated: Any) -> Any:
            keys, values = expand(self, latent, rotated)
            return keys * 2, values

        monkeypatch.setattr(DeepseekV3Attention, "expand_kv", double)
        reason = "different keys and values"
    else:  # what only the self-test finds out
        monkeypatch.setattr(
            DeepseekV3Attention, "forward", lambda self, *args, **more: forward(self, *args, softcap=1e4, **more)
        )
        reason = "caps its scores"
    with caplog.at_level(logging.WARNING):
        core = EngineCore(bundle, EngineSettings(kv_cache_memory=1 << 20, max_num_batched_tokens=16))
    assert reason in core.info.kv_cache_reason
    assert any("keeps whole keys and values" in record.message for record in caplog.records)
    assert core.info.max_kv_tokens == min(256, (1 << 20) // (2 * 4 * (16 + 8) * 4))
    if how == "keys":
        assert texts(core, PROMPTS[:3]) == [greedy(model, prompt, 12) for prompt in PROMPTS[:3]]
    core.close()


def test_code_without_a_separate_latent_is_reported() -> None:
    """A model with latent attention whose own code never separates the latent runs by that code, with a reason."""
    config = tf.LlamaConfig(**LATENT, head_dim=8)
    assert config.kv_lora_rank
    assert latent_attention.install(make_model(config)) == ([], "its code makes whole keys and values at once")
    assert latent_attention.install(make_model(FAMILIES["llama"]())) == ([], "")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_the_latent(bundle: Bundle, dtype: str) -> None:
    """In half precision the latent is still cached, and a token takes half the memory."""
    core = EngineCore(bundle, EngineSettings(dtype=dtype, kv_cache_memory=50 * TOKEN_BYTES))
    assert (core.info.kv_cache_reason, core.info.max_kv_tokens) == ("", 100)
    assert len(texts(core, PROMPTS[2:3])[0]) == 12
    core.close()
