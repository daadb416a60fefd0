"""Rotary embeddings by a Triton kernel: what the model's own function computes, or not used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_runs import run
from tiny_models import FAMILIES, MORE_FAMILIES, greedy, make_model, prompt_of, request_of
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.utils.deprecation import deprecate_kwarg

from mlflow_llm.serving.engine.attention import attention
from mlflow_llm.serving.engine.attention.kv_cache import LayerShape
from mlflow_llm.serving.engine.attention.paged.layer_blocks import LayerBlocks
from mlflow_llm.serving.engine.attention.rotation import Rotation
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.devices import triton_support
from mlflow_llm.serving.engine.models.fused import rotary as fused_rotary
from mlflow_llm.serving.engine.weights.forward_context import ContextHolder
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IDS = torch.arange(3, 20)[None]
NO_DEVICE = pytest.mark.skipif(DEVICE.type != "cuda", reason="Triton's interpreter has no bfloat16")
TYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=NO_DEVICE)]


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "width"), [(4, 2, 16), (9, 3, 24), (1, 1, 2)])
def test_the_kernel_equals_torch(num_heads: int, num_kv_heads: int, width: int, dtype: torch.dtype) -> None:
    """Queries and keys with odd numbers of heads and odd widths are rotated as torch does, to the bit in 16 bits."""
    own = modeling_llama.apply_rotary_pos_emb
    q, k = (torch.randn(1, 5, n, width, device=DEVICE).to(dtype).transpose(1, 2) for n in (num_heads, num_kv_heads))
    cos, sin = (torch.randn(1, 5, width, device=DEVICE).to(dtype) for _ in range(2))
    for found, wanted in zip(fused_rotary.rotated(own, q, k, cos, sin), own(q, k, cos, sin), strict=True):
        if dtype != torch.float32:
            assert torch.equal(found, wanted)
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_other_forms_are_left_to_the_model() -> None:
    """Several rows, and positions of another width, are computed by the model's own function."""
    calls = []

    def own(*args: Any, **options: Any) -> tuple[Any, Any]:
        calls.append(options)
        return modeling_llama.apply_rotary_pos_emb(*args, **options)

    q, cos = torch.randn(2, 3, 5, 8), torch.randn(2, 5, 8)
    fused_rotary.rotated(own, q, q, cos, cos)
    fused_rotary.rotated(own, q[:1], q[:1], cos[:1], cos[:1], unsqueeze_dim=1)
    assert calls == [{}, {"unsqueeze_dim": 1}]


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    ("family", "count"),
    [("llama", 2), ("qwen3", 2), ("gemma2", 2), ("glm4", 0), ("gpt_oss", 0)],
    ids=lambda value: str(value),
)
@torch.inference_mode()
def test_models_give_the_same(family: str, count: int) -> None:
    """The layers that rotate halves use the kernel, others (GLM turns neighbours, GPT-OSS has half as many angles) do
    not, and the logits are the model's."""
    model = make_model((FAMILIES | MORE_FAMILIES)[family]()).to(DEVICE)
    wanted = model(IDS.to(DEVICE)).logits
    assert fused_rotary.install(model) == count
    torch.testing.assert_close(model(IDS.to(DEVICE)).logits, wanted, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_kernel_that_does_not_run_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On CPU nothing is replaced; a kernel that raises or is wrong leaves the model's own code, with a warning."""
    model = make_model(FAMILIES["llama"]())
    assert fused_rotary.install(model) == 0
    assert not caplog.messages
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)

    def broken(*args: Any) -> Any:
        raise RuntimeError("no compiler")

    for wrong, reason in ((broken, "no compiler"), (lambda own, q, k, cos, sin: (q, k), "differs from the reference")):
        caplog.clear()
        monkeypatch.setattr(fused_rotary, "rotated", wrong)
        assert fused_rotary.install(model) == 0
        (said,) = caplog.messages
        assert said.startswith("torch, not our kernel, computes the rotary embeddings of LlamaAttention: the kernel ")
        assert reason in said


@pytest.mark.usefixtures("_kernels")
def test_engine_with_the_kernels_equals_generate(
    tiny_bundle: Bundle, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and decodes over blocks, with keys rotated and written by one kernel, give generate()'s tokens."""
    written = []
    by_kernel = LayerBlocks.write_rotated_by_kernel

    def counted(self: LayerBlocks, indexes: Any, rotation: Any, v: Any) -> Any:
        written.append(len(indexes))
        return by_kernel(self, indexes, rotation, v)

    monkeypatch.setattr(LayerBlocks, "write_rotated_by_kernel", counted)
    settings = EngineSettings(
        max_num_seqs=3, max_num_batched_tokens=16, kv_cache_memory=1 << 20, kv_block_size=8, kernels="torch",
        dtype="float32",
    )  # fmt: skip
    core = EngineCore(tiny_bundle, settings)
    prompts = [prompt_of(n, seed) for seed, n in enumerate((3, 20))]
    outcomes = run(core, *(request_of(str(i), prompt, max_tokens=4) for i, prompt in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        assert outcomes[str(i)].tokens[0] == greedy(tiny_llama, prompt, 4)
    assert {1, 2, 16} <= set(written)  # decodes, alone and together, and a step full of prompts
    core.close()


class Scaled(modeling_llama.LlamaAttention):  # type: ignore[misc]
    """Attention whose queries are scaled after their rotation."""

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, **more: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (one(hidden_states).view(shape).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        out, _ = attention.attend(self, 2 * q, k, v, attention_mask, self.scaling)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


@pytest.mark.usefixtures("_kernels")
@torch.inference_mode()
def test_queries_changed_after_their_rotation_are_rotated_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """A layer that does something between rotation and attention keeps the kernel that only rotates, and one that does
    not leaves the rotation to its attention."""
    caplog.set_level("INFO")
    holder = ContextHolder()
    model = make_model(FAMILIES["llama"]()).to(DEVICE)
    model.set_attn_implementation(attention.NAME)
    model.model.layers[1].self_attn.__class__ = Scaled
    attention.install(model, holder)
    assert fused_rotary.install(model) == 2
    names = [layer.self_attn.forward.__globals__[fused_rotary.NAME].func for layer in model.model.layers]
    assert [getattr(one, "func", one) for one in names] == [fused_rotary.rotated_later, fused_rotary.rotated]
    assert "Scaled rotates before its attention: UnsupportedAttentionError" in caplog.text


class Renamed(modeling_llama.LlamaAttention):  # type: ignore[misc]
    """Attention with an argument that transformers also takes by its former name."""

    renamed = deprecate_kwarg("mask", version="99.0.0", new_name="attention_mask")
    forward = renamed(modeling_llama.LlamaAttention.forward)


@pytest.mark.usefixtures("_kernels")
@torch.inference_mode()
def test_attention_with_renamed_arguments_has_the_kernel() -> None:
    """A forward inside transformers' wrapper for former names leaves the rotation to its attention like any other."""
    holder = ContextHolder()
    model = make_model(FAMILIES["llama"]()).to(DEVICE)
    model.set_attn_implementation(attention.NAME)
    model.model.layers[1].self_attn.__class__ = Renamed
    attention.install(model, holder)
    assert fused_rotary.install(model) == 2
    names = [layer.self_attn.forward.__globals__[fused_rotary.NAME].func for layer in model.model.layers]
    assert names == [fused_rotary.rotated_later] * 2


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "width"), [(4, 2, 16), (19, 9, 24), (1, 1, 2)])
def test_one_kernel_rotates_and_writes(num_heads: int, num_kv_heads: int, width: int, dtype: torch.dtype) -> None:
    """Queries, keys and values are those of a rotation and a write one after the other, and nothing else is written."""
    q, k, v = (
        torch.randn(1, 5, n, width, device=DEVICE).to(dtype).transpose(1, 2)
        for n in (num_heads, num_kv_heads, num_kv_heads)
    )
    rotation = Rotation(q, k, *(torch.randn(1, 5, width, device=DEVICE).to(dtype) for _ in range(2)))
    layers = [LayerBlocks.of(LayerShape(num_kv_heads, width, width), 3, 4, dtype, DEVICE) for _ in range(2)]
    places = torch.tensor([6, 1, 11, 3, 8], device=DEVICE)
    found = layers[0].write_rotated_by_kernel(places, rotation, v[0])
    wanted, keys = rotation.apply()
    layers[1].write_by_kernel(places, keys[0], v[0])
    assert torch.equal(found, wanted)
    assert torch.equal(layers[0].k, layers[1].k)
    assert torch.equal(layers[0].v, layers[1].v)
    assert int((layers[0].k != 0).flatten(2).any(2).sum()) == len(places)
