"""Factors of the inputs of int8 linears, on tiny random models."""

import pytest
import torch
from tiny_models import COMMON, FAMILIES, make_model
from transformers import LlamaConfig

from mlflow_llm.serving.engine.weights import input_factors, linear
from mlflow_llm.serving.engine.weights.forward_context import ContextHolder
from mlflow_llm.serving.engine.weights.quantization import Int8Weight
from mlflow_llm.serving.engine.weights.stored_weights import factors_of
from mlflow_llm.serving.interface.settings import EngineSettings


def outlying(rows: int, width: int) -> torch.Tensor:
    """Return random rows some of whose inputs are many times as large as the others."""
    return torch.randn(rows, width) * torch.where(torch.arange(width) % 19 == 0, 30.0, 1.0)


@pytest.mark.parametrize("width", [64, 576])
def test_balanced_inputs_lose_less(width: int) -> None:
    """Factors take away more than half of int8's error where activations have outliers that weights do not have."""
    torch.manual_seed(0)
    weight, x = torch.randn(48, width), outlying(200, width)
    factors = input_factors.balanced(x.double().square().sum(0), [weight])
    exact = x.double() @ weight.double().t()
    plain, balanced = (
        (Int8Weight(weight, None, inputs=one).matmul(x).double() - exact).norm() for one in (None, factors)
    )
    assert balanced < 0.5 * plain


def test_factors_are_coarse_and_bounded() -> None:
    """Factors are powers of the root of 2 whose product is about 1, whatever the scales of inputs and weights, and the
    rarest input has one that is not much larger than the others'."""
    torch.manual_seed(1)
    squares, weights = outlying(50, 64).double().square().sum(0), [torch.randn(32, 64), torch.randn(16, 64) * 100]
    squares[5] = 0.0
    factors = input_factors.balanced(squares, weights)
    assert factors is not None
    exponents = 2 * factors.double().log2()
    torch.testing.assert_close(exponents, exponents.round(), atol=1e-5, rtol=0)
    assert exponents.mean().abs() < 0.5
    same = input_factors.balanced(squares * 1e6, [one * 0.01 for one in weights])
    assert same is not None
    assert torch.equal(same, factors)
    assert factors[5] <= 4 * factors.median()


@pytest.mark.parametrize("squares", [torch.zeros(64), torch.full((64,), torch.inf)])
def test_inputs_that_say_nothing_have_no_factors(squares: torch.Tensor) -> None:
    """Inputs that are all zero, or not finite, give no factors."""
    assert input_factors.balanced(squares.double(), [torch.randn(16, 64)]) is None


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_each_family_is_measured(name: str) -> None:
    """The linears of every family of decoders that share an input have the same factors, the same each time."""
    model, other = make_model(FAMILIES[name]()), make_model(FAMILIES[name]())
    input_factors.measure(model)
    input_factors.measure(other)
    assert any(factors_of(module) is not None for module in model.modules())
    for _, paths, modules, _ in linear.groups_of(model):
        for path, module in zip(paths, modules, strict=True):
            found = factors_of(module)
            assert found is factors_of(modules[0])
            again = factors_of(other.get_submodule(path))
            assert (found is None) == (again is None)
            assert found is None or again is None or torch.equal(found, again)


@pytest.mark.parametrize("texts", [(), ([7, 5, 90, 33] * 8, [4, 50, 61, 12])])
@torch.inference_mode()
def test_measured_factors_fit_other_tokens(texts: tuple[list[int], ...]) -> None:
    """In a model whose norm makes outliers, factors measured by random tokens or by texts halve the error of products
    with the inputs that other tokens have; installed linears multiply with them."""
    model = make_model(LlamaConfig(**COMMON | {"hidden_size": 64}))
    layer = model.model.layers[1]
    layer.post_attention_layernorm.weight[::16] = 30.0
    seen: list[torch.Tensor] = []
    hook = layer.mlp.gate_proj.register_forward_pre_hook(lambda module, given: seen.append(given[0][0]))
    model(torch.arange(10, 60)[None])
    hook.remove()
    weight = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
    input_factors.measure(model, texts)
    balanced = Int8Weight(weight, None, inputs=factors_of(layer.mlp.up_proj)).matmul(seen[0])
    exact = seen[0].double() @ weight.double().t()
    assert (balanced - exact).norm() < 0.6 * (Int8Weight(weight, None).matmul(seen[0]) - exact).norm()
    linear.install(model, ContextHolder(), EngineSettings(quantization="int8", kernels="torch"))
    rows = layer.mlp.gate_proj.out_features
    assert torch.equal(layer.mlp.gate_proj(seen[0]), balanced[:, :rows])
    assert torch.equal(layer.mlp.up_proj(seen[0]), balanced[:, rows:])
