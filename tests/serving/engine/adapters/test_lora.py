"""The LoRA pool beside peft on tiny random models."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from mlflow_llm.serving.engine.adapters import lora_plan
from mlflow_llm.serving.engine.adapters.lora import LoraPool
from mlflow_llm.serving.engine.adapters.lora_plan import MaskedPlan, SegmentPlan, segments_of
from mlflow_llm.serving.engine.weights import linear
from mlflow_llm.serving.engine.weights.forward_context import ContextHolder, ForwardContext
from mlflow_llm.serving.interface.errors import InvalidField, NotFound
from mlflow_llm.serving.interface.settings import EngineSettings

CONFIGS = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "rs": {"r": 8, "use_rslora": True, "target_modules": "all-linear"},
    "patterns": {
        "r": 2,
        "target_modules": ["k_proj", "up_proj", "gate_proj"],
        "rank_pattern": {"k_proj": 3, r"layers\.1\.mlp\.up_proj": 5},
        "alpha_pattern": {"up_proj": 32},
    },
}
# peft 0.21 reads a property that transformers 5.23 deprecates, and warns that a tied head is adapted
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
]
IDS = torch.arange(1, 8)[None]


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, num_hidden_layers=2, **sizes)).eval()


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64)).eval()


def save_adapter(folder, make=llama, **config):
    """Save a random adapter in peft's layout and return peft's own logits."""
    torch.manual_seed(len(str(folder)))
    model = get_peft_model(make(), LoraConfig(init_lora_weights=False, **config)).eval()
    model.save_pretrained(folder)
    with torch.inference_mode():
        return model(IDS).logits[0]


def load(pool, name, path):
    pool.add(name, pool.read(name, path))


def pool_over(model):
    holder = ContextHolder()
    linear.install(model, holder, EngineSettings())
    return holder, LoraPool(model, holder, torch.float32)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {name: (root / name, save_adapter(root / name, **config)) for name, config in CONFIGS.items()}


def test_a_batch_of_adapters_and_base_gives_what_peft_gives_for_each(adapters):
    """Mixed ranks, targets, rsLoRA and patterns in one batch equal peft one by one; base rows are bit-unchanged."""
    model = llama()
    with torch.inference_mode():
        base = model(IDS).logits[0]
    holder, pool = pool_over(model)
    for name, (path, _) in adapters.items():
        load(pool, name, str(path))
    names = ["rs", None, "plain", "patterns", "rs"]
    with torch.inference_mode():
        ids = IDS.repeat(len(names), 1)
        holder.context = ForwardContext(num_tokens=ids.numel(), lora=pool.plan(names, [7] * len(names)))
        mixed = model(ids).logits
        holder.context = None
        without = model(ids).logits
    for row, name in zip(mixed, names, strict=True):
        expected = base if name is None else adapters[name][1]
        assert torch.allclose(row, expected, atol=2e-6)
    assert torch.equal(mixed[1], without[1])
    assert not torch.allclose(mixed[0], base, atol=1e-3)


def test_segment_plan_equals_masked_plan(adapters, monkeypatch):
    """Long runs of many adapters are multiplied by segments, single tokens masked; both give the same in any order."""
    model = llama()
    holder, pool = pool_over(model)
    for name, (path, _) in adapters.items():
        load(pool, name, str(path))
    names, counts = ["rs", None, "plain", "patterns", "patterns", "rs"], [40, 30, 60, 20, 30, 20]
    ids = torch.arange(sum(counts))[None] % 97
    results = {}
    for kind, gain in ((SegmentPlan, 0), (MaskedPlan, 1e9)):
        monkeypatch.setattr(lora_plan, "SEGMENT_GAIN", gain)
        plan = pool.plan(names, counts)
        assert isinstance(plan, kind)
        with torch.inference_mode():
            holder.context = ForwardContext(num_tokens=ids.numel(), lora=plan)
            results[kind] = model(ids).logits[0]
    assert torch.allclose(results[SegmentPlan], results[MaskedPlan], atol=2e-6)


def test_the_cheaper_plan_is_taken(adapters):
    """Prefill chunks of several adapters go by segments; one adapter, or tokens that alternate, are masked."""
    _, pool = pool_over(llama())
    for name in "abcdefgh":
        load(pool, name, str(adapters["rs"][0]))
    assert isinstance(pool.plan(list("abcdefgh"), [64] * 8), SegmentPlan)
    assert isinstance(pool.plan(["a", None], [500, 12]), MaskedPlan)
    assert isinstance(pool.plan(list("abcdefgh") * 4, [1] * 32), MaskedPlan)
    with pytest.raises(NotFound):
        pool.plan([*"abcdefgh", "nobody"], [64] * 9)
    pool.remove("a")
    with pytest.raises(NotFound):
        pool.plan(list("abcdefgh"), [64] * 8)


def test_neighbours_are_one_segment():
    """Sequences of one adapter side by side are one segment; the base's rows are in none."""
    names = ["a", "a", None, "a", "b", "b"]
    assert segments_of(names, [2, 1, 3, 1, 0, 2]) == [("a", 0, 3), ("a", 6, 7), ("b", 7, 9)]


def test_fan_in_fan_out_of_gpt2(tmp_path):
    """Adapters of GPT-2's transposed linears equal peft."""
    expected = save_adapter(tmp_path / "a", gpt2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    model = gpt2()
    holder, pool = pool_over(model)
    load(pool, "a", str(tmp_path / "a"))
    with torch.inference_mode():
        holder.context = ForwardContext(num_tokens=7, lora=pool.plan(["a"], [7]))
        assert torch.allclose(model(IDS).logits[0], expected, atol=2e-6)


def test_adding_and_removing(adapters):
    """A removed adapter is forgotten, and a step of base rows alone has no plan."""
    _, pool = pool_over(llama())
    path = str(adapters["patterns"][0])
    assert pool.read("a", path).rank == 5
    load(pool, "a", path)
    load(pool, "b", path)
    assert pool.plan([None, None], [3, 1]) is None
    assert pool.plan(["a", None], [3, 1]) is not None
    pool.remove("a")
    with pytest.raises(NotFound):
        pool.plan(["a", None], [3, 1])
    assert ("a" in pool, "b" in pool, len(pool)) == (False, True, 1)


def test_a_name_loaded_again_has_its_new_weights(adapters):
    """Concatenations of an unloaded adapter are not served to a new one of the same name."""
    model = llama()
    holder, pool = pool_over(model)
    for name in ("plain", "rs"):
        path, expected = adapters[name]
        load(pool, "x", str(path))
        with torch.inference_mode():
            holder.context = ForwardContext(num_tokens=7, lora=pool.plan(["x"], [7]))
            assert torch.allclose(model(IDS).logits[0], expected, atol=2e-6)
        pool.remove("x")


REFUSALS = {
    "peft_type": ("LOHA", "LOHA"),
    "use_dora": (True, "magnitude"),
    "modules_to_save": (["lm_head"], "modules_to_save"),
    "trainable_token_indices": ([1], "trainable_token_indices"),
    "bias": ("all", "bias"),
    "init_lora_weights": ("pissa", "pissa"),
    "r": (6, "rank 4"),
}


@pytest.mark.parametrize("key", REFUSALS)
def test_unsupported_adapter_settings_are_refused_by_name(adapters, tmp_path, key):
    """A configuration that would change the result in a way not built here is named in the error."""
    value, said = REFUSALS[key]
    source = adapters["plain"][0]
    folder = tmp_path / "bad"
    folder.mkdir()
    config = json.loads((source / "adapter_config.json").read_text()) | {key: value}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes((source / "adapter_model.safetensors").read_bytes())
    with pytest.raises(InvalidField, match=said):
        load(pool_over(llama())[1], "bad", str(folder))


def test_an_adapter_of_another_base_names_module_and_shapes(tmp_path):
    """Wrong shapes, unknown modules, the output head, a missing or broken file: each named."""
    _, pool = pool_over(llama())
    save_adapter(tmp_path / "gpt2", gpt2, target_modules=["c_attn"], fan_in_fan_out=True)
    with pytest.raises(InvalidField, match="no linear module 'transformer"):
        load(pool, "a", str(tmp_path / "gpt2"))

    def wide():
        sizes = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=100, num_hidden_layers=1, **sizes))

    model = get_peft_model(wide(), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "wide")
    with pytest.raises(InvalidField, match=r"q_proj' adapts the shape \(48, 48\), but the base's is \(32, 32\)"):
        load(pool, "a", str(tmp_path / "wide"))
    save_adapter(tmp_path / "head", target_modules=["lm_head"])
    with pytest.raises(InvalidField, match="lm_head"):
        load(pool, "a", str(tmp_path / "head"))
    with pytest.raises(InvalidField, match=r"no adapter_config\.json"):
        load(pool, "a", str(tmp_path / "nowhere"))
    (tmp_path / "head" / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(InvalidField, match="cannot be read"):
        load(pool, "a", str(tmp_path / "head"))
