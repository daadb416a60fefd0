"""Fused Triton kernels for norms, gated MLPs and residuals: equal to the model's own code, or not used."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from engine_runs import run
from tiny_models import FAMILIES, MORE_FAMILIES, greedy, make_model, prompt_of, request_of

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.devices import triton_support
from mlflow_llm.serving.engine.models.fused import modules as fused_modules
from mlflow_llm.serving.engine.models.fused import residuals as fused_residuals
from mlflow_llm.serving.engine.weights import linear
from mlflow_llm.serving.engine.weights.forward_context import ContextHolder
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings

pytest.importorskip("triton")
fused_kernels = importlib.import_module("mlflow_llm.serving.engine.models.fused.kernels")  # which needs triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IDS = torch.arange(3, 20)[None]


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("llama", 2 * 4 + 1),
        ("qwen3", 2 * 6 + 1),
        ("phi3", 2 * 3 + 1),
        ("granite", 2 * 3 + 1),
        ("glm4", 2 * 4 + 1),
        ("gemma2", 0),
    ],
    ids=[
        "norms, gates and residuals",
        "norms of heads",
        "gates in one linear are left",
        "scaled residuals are left",
        "norms of branches, whose residuals are left",
        "other norms and gates are left",
    ],
)
@torch.inference_mode()
def test_models_give_the_same(family: str, count: int) -> None:
    """The expected number of modules of each family runs by kernels, and the logits are the model's."""
    model = make_model((FAMILIES | MORE_FAMILIES)[family]()).to(DEVICE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    wanted = model(IDS.to(DEVICE)).logits
    assert fused_modules.install(model) == count
    torch.testing.assert_close(model(IDS.to(DEVICE)).logits, wanted, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_kernel_that_does_not_run_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """On CPU nothing is replaced; if a kernel raises, the model's own code stays, with a warning."""
    model = make_model(FAMILIES["llama"]())
    assert fused_modules.install(model) == 0
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)

    def broken(self: Any, x: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(fused_modules, "norm_forward", broken)
    monkeypatch.setattr(fused_modules, "gated_forward", broken)
    assert fused_modules.install(model) == 0
    assert "the kernel does not run: no compiler" in caplog.text


class Norm(torch.nn.Module):
    variance_epsilon = 1e-5

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, size, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 5, 300), (3, 2, 1000)])
@torch.inference_mode()
def test_a_sum_and_its_norm(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The fused sum is bitwise torch's; its norm is kept for that very tensor, strided rows included, and used once."""
    norm = Norm(shape[-1]).to(dtype)
    x = torch.randn(*shape, device=DEVICE).to(dtype)
    more = torch.randn(*shape[:-1], 2 * shape[-1], device=DEVICE).to(dtype)[..., : shape[-1]]
    total = fused_residuals.add(x, more, norm)
    assert torch.equal(total, x + more)
    assert fused_residuals.normed(norm, total.clone()) is None
    assert fused_residuals.normed(norm, total) is None
    total = fused_residuals.add(x, more, norm)
    found = fused_modules.norm_forward(norm, total)
    torch.testing.assert_close(found, fused_modules.norm_forward(norm, total), rtol=1e-3, atol=1e-3)
    wanted = norm.weight * (total.float() * torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_sums_of_mixed_types_are_left_to_torch() -> None:
    """For mixed types or shapes, or without a norm to follow, torch adds and nothing is kept."""
    norm, x = Norm(8), torch.randn(1, 3, 8, device=DEVICE)
    for more, by in ((x.half(), norm), (x[:, :1], norm), (x, None)):
        assert torch.equal(fused_residuals.add(x, more, by), x + more)
        assert fused_residuals.NORMED not in norm.__dict__


@pytest.mark.usefixtures("_kernels")
@torch.inference_mode()
def test_most_norms_of_a_model_are_computed_with_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of the five norms of two layers are fused with their sums, and no result is left over."""
    model = make_model(FAMILIES["llama"]()).to(DEVICE)
    fused_modules.install(model)
    counts = {"rms_norm": 0, "add_rms_norm": 0}
    for name in counts:
        monkeypatch.setattr(fused_kernels, name, Counted(getattr(fused_kernels, name), counts, name))
    model(IDS.to(DEVICE))
    assert counts == {"rms_norm": 1, "add_rms_norm": 4}
    assert not any(fused_residuals.NORMED in module.__dict__ for module in model.modules())


class Counted:
    """A kernel whose launches are counted."""

    def __init__(self, kernel: Any, counts: dict[str, int], name: str) -> None:
        self.kernel, self.counts, self.name = kernel, counts, name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.counts[self.name] += 1
        return self.kernel[grid]


@pytest.mark.usefixtures("_kernels")
@torch.inference_mode()
def test_gates_that_share_a_product_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads gate and up from the rows of their shared product without a copy."""
    model = make_model(FAMILIES["llama"]()).to(DEVICE)
    wanted = model(IDS.to(DEVICE)).logits
    fused_modules.install(model)
    linear.install(model, ContextHolder(), EngineSettings(kernels="torch"))
    products, own = [], linear.LinearGroup.compute
    monkeypatch.setattr(linear.LinearGroup, "compute", lambda self, x: products.append(self.key) or own(self, x))
    monkeypatch.setattr(fused_modules, "view_rows", lambda x: x.view(-1, x.shape[-1]))  # raises where it would copy
    torch.testing.assert_close(model(IDS.to(DEVICE)).logits, wanted, rtol=1e-4, atol=1e-4)
    assert sorted(map(len, products)) == [1, 1, 1, 1, 1, 2, 2, 3, 3]  # o, down and the head alone


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_cuda.py looks at it there")
@pytest.mark.usefixtures("_kernels")
def test_an_engine_with_fused_modules(tiny_bundle: Bundle, tiny_llama: Any) -> None:
    """An engine with all fused modules gives generate()'s texts for chunks, single tokens and fixed buffers."""
    settings = EngineSettings(
        kernels="torch", kv_block_size=16, max_num_seqs=3, max_num_batched_tokens=16, kv_cache_memory=1 << 22
    )
    core = EngineCore(tiny_bundle, settings)
    prompts = [prompt_of(size, size) for size in (3, 20)]
    outcomes = run(core, *(request_of(str(i), prompt, max_tokens=4) for i, prompt in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        assert outcomes[str(i)].tokens[0] == greedy(tiny_llama, prompt, 4)
    core.close()


@pytest.mark.usefixtures("_kernels")
@torch.inference_mode()
def test_layers_of_another_form_keep_their_code(caplog: Any) -> None:
    """A layer whose residuals have another form keeps its own code, which is logged by the layer's name."""
    caplog.set_level("INFO")
    model = make_model(MORE_FAMILIES["granite"]()).to(DEVICE)
    fused_modules.install(model)
    assert "residuals are added by torch in GraniteDecoderLayer: it has another form" in caplog.text
    assert all("forward" not in layer.__dict__ for layer in model.model.layers)
    assert type(model.model.layers[0].self_attn).__name__ == "GraniteAttention"
