"""Rows quantised to float8 by one kernel, alone or within the norm or the gate that computes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, make_model

from mlflow_llm.serving.engine.devices import triton_support
from mlflow_llm.serving.engine.models.fused import modules as fused_modules
from mlflow_llm.serving.engine.weights import fp8, fp8_inputs, linear
from mlflow_llm.serving.engine.weights.forward_context import ContextHolder
from mlflow_llm.serving.interface.settings import EngineSettings

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NARROW = not CUDA or torch.cuda.get_device_capability() >= fp8.CAPABILITY
in_float8 = pytest.mark.skipif(not NARROW, reason="the device has no products in float8")
on_device = pytest.mark.skipif(not CUDA, reason="Triton's interpreter does not know bfloat16")
TRIALS = (fp8.why_not_kernel, fp8.why_not_scaled_mm, fp8.why_not_one_kernel)


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run Triton's kernels, in its interpreter if there is no device."""
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)
    for known in TRIALS:
        known.cache_clear()
    yield
    for known in TRIALS:
        known.cache_clear()


def same(found: Any, wanted: Any) -> bool:
    (q, scale), (other, other_scale) = found, wanted
    return torch.equal(q.view(torch.uint8), other.view(torch.uint8)) and torch.equal(scale, other_scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=on_device)])
@pytest.mark.parametrize("size", [16, 528, 5000])
def test_one_kernel_quantises_as_torch_does(dtype: torch.dtype, size: int) -> None:
    """Values of all magnitudes, zeros, rows of zeros and strided rows have the bits that torch gives them."""
    make = torch.Generator().manual_seed(0)
    magnitudes = 10 ** torch.empty(7, size + 16).uniform_(-7, 2, generator=make)
    x = (torch.randn(7, size + 16, generator=make) * magnitudes).to(DEVICE, dtype)[:, 16:]
    x[1] = torch.linspace(-448, 448, size)
    x[2] = 0
    x[3, ::2] = -0.0
    assert same(fp8.quantize_by_kernel(x), fp8.quantize_rows(x))
    assert same(fp8.quantize_by_kernel(x[:, ::2]), fp8.quantize_rows(x[:, ::2]))


def test_midpoints_go_to_even_numbers() -> None:
    """Each number of e4m3fn, and each midpoint of two, becomes what torch makes of it."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, middles, -numbers, -middles])[None].to(DEVICE)  # the largest is 448, so the scale is 1
    assert same(fp8.quantize_by_kernel(x), fp8.quantize_rows(x))


@pytest.mark.usefixtures("_kernels")
def test_a_kernel_that_rounds_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel's rows differ, torch quantises."""
    own = fp8.quantize_by_kernel
    monkeypatch.setattr(fp8, "quantize_by_kernel", lambda x: (own(x)[0], own(x)[1] * 2))
    assert "differs from the reference" in fp8.why_not_one_kernel(DEVICE, torch.float32)
    x = torch.randn(3, 32, device=DEVICE)
    assert same(fp8.quantized(x), fp8.quantize_rows(x))


@in_float8
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_norms_and_gates_quantise_for_the_products_that_read_them(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """From the second step of many rows on, only the attention's result is quantised by a kernel of its own, with the
    same bits; steps of few rows quantise nothing."""
    model = make_model(FAMILIES[family]()).to(DEVICE)
    assert fused_modules.install(model)
    linear.install(model, ContextHolder(), EngineSettings(quantization="fp8", kernels="torch"))
    assert not fp8.why_not_one_kernel(DEVICE, torch.float32)  # whose trial is not counted
    alone, given = [], []
    by_kernel, take = fp8.quantize_by_kernel, fp8_inputs.take

    def counted(x: torch.Tensor) -> Any:
        alone.append(x.shape)
        return by_kernel(x)

    def looked_at(x: torch.Tensor) -> Any:
        if (found := take(x)) is not None:
            given.append(found)
            assert same(found, fp8.quantize_rows(x))
        return found

    monkeypatch.setattr(fp8, "quantize_by_kernel", counted)
    monkeypatch.setattr(fp8_inputs, "take", looked_at)
    ids = torch.arange(3, 23, device=DEVICE)[None]
    with fp8.all_rows_are_many():
        first = model(ids).logits
        assert (len(alone), len(given)) == (8, 0)
        again = model(ids).logits
        assert (len(alone), len(given)) == (8 + 2, 6)  # two layers: input norm, norm of the MLP, gate
    assert torch.equal(first, again)
    model(ids)
    assert (len(alone), len(given)) == (10, 6)


@in_float8
@pytest.mark.usefixtures("_kernels")
@torch.inference_mode()
def test_gates_wider_than_registers_are_quantised_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate whose rows do not fit leaves its quantisation to the product, with the same result."""
    model = make_model(FAMILIES["llama"]()).to(DEVICE)
    fused_modules.install(model)
    linear.install(model, ContextHolder(), EngineSettings(quantization="fp8", kernels="torch"))
    ids = torch.arange(3, 23, device=DEVICE)[None]
    with fp8.all_rows_are_many():
        model(ids)
        wanted = model(ids).logits
        monkeypatch.setattr(fused_modules, "MAX_GATE_WIDTH", 32)
        assert torch.equal(model(ids).logits, wanted)
