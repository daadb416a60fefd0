"""Engine linears on tiny random models."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from mlflow_llm.serving.engine.weights import linear
from mlflow_llm.serving.engine.weights.forward_context import ContextHolder
from mlflow_llm.serving.engine.weights.quantization import Int8Weight, quantize_rows, rotated
from mlflow_llm.serving.engine.weights.weight_layouts import OneDnnWeight, PlainWeight, can_block
from mlflow_llm.serving.interface.settings import EngineSettings


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, num_hidden_layers=2, **sizes, **changes)).eval()


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64)).eval()


@pytest.mark.parametrize("make", [tiny_llama, lambda: tiny_llama(attention_bias=True, mlp_bias=True), tiny_gpt2])
def test_float32_logits_are_those_of_the_model(make):
    """Packing and fusing change float32 logits by rounding alone, with and without biases, Conv1D included."""
    model, ids = make(), torch.randint(0, 100, (1, 9))
    with torch.inference_mode():
        expected = model(ids).logits
        linear.install(model, ContextHolder(), EngineSettings())
        assert torch.allclose(model(ids).logits, expected, atol=1e-5)


def test_every_linear_is_found_and_siblings_share_one_gemm():
    """q, k, v and gate, up share a group; names, shapes and the head are reported."""
    model = tiny_llama()
    found = linear.install(model, ContextHolder(), EngineSettings())
    assert found.head == "lm_head"
    assert found.shapes["model.layers.1.self_attn.k_proj"] == (16, 32)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.group is attention.v_proj.group
    assert attention.o_proj.group is not attention.q_proj.group


def test_weight_and_bias_stay_readable():
    """``weight``, ``bias``, ``in_features`` and ``out_features`` of a replaced linear are the original's."""
    model = tiny_llama(attention_bias=True)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias.normal_()
    expected = {n: p.clone() for n, p in model.model.layers[0].self_attn.k_proj.named_parameters()}
    linear.install(model, ContextHolder(), EngineSettings())
    found = model.model.layers[0].self_attn.k_proj
    assert torch.equal(found.weight, expected["weight"])
    assert torch.equal(found.bias, expected["bias"])
    assert (found.in_features, found.out_features, found.weight.dtype) == (32, 16, torch.float32)


def test_siblings_called_with_different_inputs_are_each_right():
    """A sibling called with another tensor, out of order or twice never gets a stale part."""
    model = tiny_llama()
    attention = model.model.layers[0].self_attn
    weights = {name: getattr(attention, name).weight.detach().clone() for name in ("q_proj", "k_proj", "v_proj")}
    linear.install(model, ContextHolder(), EngineSettings())
    inputs = [torch.randn(3, 32) for _ in range(2)]
    calls = [("v_proj", 0), ("q_proj", 0), ("q_proj", 0), ("k_proj", 1), ("v_proj", 1), ("k_proj", 0), ("q_proj", 1)]
    with torch.inference_mode():
        for name, which in calls:
            expected = inputs[which] @ weights[name].t()
            assert torch.allclose(getattr(attention, name)(inputs[which]), expected, atol=1e-5)


def test_int8_row_is_bitwise_the_same_alone_and_in_a_batch():
    """A token's int8 result does not depend on what shares its batch."""
    torch.manual_seed(1)
    packed = Int8Weight(torch.randn(48, 32), torch.randn(48))
    x = torch.randn(33, 32) * torch.logspace(-3, 3, 33)[:, None]
    with torch.inference_mode():
        together = packed.matmul(x)
        for row in range(33):
            assert torch.equal(packed.matmul(x[row : row + 1])[0], together[row])


def test_int8_is_near_the_float_product():
    """int8 products stay within 2 % of the float product's size; a row of zeros gives the bias."""
    torch.manual_seed(2)
    weight, bias, x = torch.randn(64, 128), torch.randn(64), torch.randn(5, 128)
    x[3] = 0
    y, expected = Int8Weight(weight, bias).matmul(x), x @ weight.t() + bias
    assert (y - expected).norm() / expected.norm() < 0.02
    assert torch.equal(y[3], bias)


@pytest.mark.parametrize("width", [33, 40, 48, 64, 576, 1536, 4096])
def test_a_hadamard_matrix_mixes_rows(width):
    """The Hadamard matrix is orthonormal and its own inverse, and spreads one input over its block."""
    torch.manual_seed(3)
    x, order = torch.randn(3, width), width & -width
    assert torch.allclose(rotated(rotated(x)), x, atol=1e-5)
    spread = rotated(torch.eye(width))
    assert torch.allclose(spread @ spread.t(), torch.eye(width), atol=1e-5)
    assert torch.allclose(spread[0, :order], torch.full((order,), order**-0.5))
    assert not spread[0, order:].any()
    assert torch.equal(rotated(x[None])[0, 1], rotated(x[1]))


def test_an_outlier_does_not_take_the_levels_of_others():
    """With rotation, an outlier costs less than a fifth of the rounding error that it costs without."""
    torch.manual_seed(4)
    weight, x = torch.randn(64, 512), torch.randn(20, 512)
    x[:, 7] *= 100
    exact, rows = x @ weight.t(), {}
    for is_rotated in (False, True):
        rows[is_rotated] = (Int8Weight(weight, None, is_rotated=is_rotated).matmul(x) - exact).norm()
    assert rows[True] < 0.2 * rows[False]


def test_quantised_rows_have_their_own_scales():
    """Each row reaches 127 whatever the others hold."""
    q, scale = quantize_rows(torch.tensor([[1e-4, -1e-4], [5.0, -1000.0]]))
    assert q.tolist() == [[127, -127], [1, -127]]
    assert scale.shape == (2, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_blocked_and_plain_weights_agree(dtype, rows):
    """oneDNN's layout gives what torch's own GEMM gives, at any number of rows."""
    torch.manual_seed(3)
    weight, bias, x = torch.randn(24, 40).to(dtype), torch.randn(24).to(dtype), torch.randn(rows, 40).to(dtype)
    if not can_block(weight):
        assert dtype == torch.bfloat16
        return
    with torch.inference_mode():
        blocked, plain = OneDnnWeight(weight, bias), PlainWeight(weight, bias)
        tolerance = 1e-5 if dtype == torch.float32 else 0.2
        assert torch.allclose(blocked.matmul(x), plain.matmul(x), atol=tolerance)
        assert torch.equal(blocked.dense(), weight)


def test_int8_leaves_head_and_gates_in_float():
    """The output head and linears of a few outputs are not quantised."""
    model = tiny_llama()
    found = linear.install(model, ContextHolder(), EngineSettings(quantization="int8", kernels="torch")).linears
    assert isinstance(found["model.layers.0.mlp.down_proj"].group.packed, Int8Weight)
    assert not isinstance(found["lm_head"].group.packed, Int8Weight)
