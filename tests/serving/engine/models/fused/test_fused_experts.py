"""Experts by our Triton kernels: equal to the model's own code for every form and number of tokens, or not used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from tiny_models import COMMON, FAMILIES, MORE_FAMILIES, make_model

from mlflow_llm.serving.engine.devices import triton_support
from mlflow_llm.serving.engine.models.fused import experts as fused_experts
from mlflow_llm.serving.engine.models.fused.experts import Blocks, Experts

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = Blocks(16, 32)
CASES = {**FAMILIES, **MORE_FAMILIES}
IDENTITY = "longcat_flash"  # some of whose experts return their token
COUNTS = {
    "mixtral": 2,
    "qwen3_moe": 2,
    "granitemoe": 2,
    "olmoe": 2,
    "phimoe": 2,
    "gpt_oss": 2,
    "deepseek_v3": 1,  # its first layer has none
    IDENTITY: 2,
}


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)


def experts_of(family: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Experts]:
    """Return the experts of a family's last layer, and our view of them; biases are random."""
    model = make_model(CASES[family]()).to(DEVICE, dtype)
    module = next(one for one in reversed(list(model.modules())) if hasattr(one, "gate_up_proj"))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    found = Experts.of(module)
    assert found is not None
    return module, found


def step(experts: Experts, tokens: int, top: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    make = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 32, generator=make)
    ids = torch.rand(tokens, experts.count + experts.has_identity, generator=make).topk(top).indices
    return x.to(DEVICE, dtype), ids.to(DEVICE), torch.rand(tokens, top, generator=make).to(DEVICE, dtype)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("family", COUNTS)
@torch.inference_mode()
def test_models_give_the_same(family: str) -> None:
    """All experts of a model run by the kernels, and its logits are those of its own code."""
    model = make_model(CASES[family]()).to(DEVICE)
    ids = torch.arange(3, 10, device=DEVICE)[None]
    wanted = model(ids).logits
    assert fused_experts.install(model) == COUNTS[family]
    torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", IDENTITY])
@torch.inference_mode()
def test_both_ways_of_any_number_of_tokens(family: str) -> None:
    """Tokens by themselves and grouped by expert, in blocks that do not divide the widths, give what the module does;
    an expert of more pairs than a program takes has several programs."""
    module, experts = experts_of(family)
    for tokens, top in ((1, 3), (20, 2)):
        x, ids, scores = step(experts, tokens, top)
        if tokens > fused_experts.BLOCK_M:
            ids[:, 0] = experts.count - 1
        wanted = module(x, ids, scores)
        for compute in (experts.few, experts.grouped):
            found = compute(x, ids, scores, SMALL, SMALL)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_half_precision() -> None:
    """In float16 the kernels are as near to float32 as the module's own code."""
    module, experts = experts_of("qwen3_moe", torch.float16)
    exact, _ = experts_of("qwen3_moe")
    x, ids, scores = step(experts, 20, 2, torch.float16)
    wanted = exact(x.float(), ids, scores.float())
    own = (module(x, ids, scores).float() - wanted).abs().max()
    for compute in (experts.few, experts.grouped):
        assert (compute(x, ids, scores, SMALL, SMALL).float() - wanted).abs().max() <= 2 * own


@torch.inference_mode()
def test_weights_in_fp8() -> None:
    """Both ways compute what the module does with the floats that float8 weights stand for, a scale a column."""
    module, experts = experts_of("qwen3_moe")
    made = experts.quantized()
    assert made is not None
    assert made.up.dtype == made.down.dtype == torch.float8_e4m3fn
    for tokens in (1, 20):
        x, ids, scores = step(experts, tokens, 2)
        if tokens > fused_experts.BLOCK_M:
            ids[:, 0] = experts.count - 1
        exact = module(x, ids, scores)
        with made.floats(module, torch.float32):
            wanted = module(x, ids, scores)
        assert 0 < (wanted - exact).abs().max() < 0.1 * exact.abs().max()
        for compute in (made.few, made.grouped):
            torch.testing.assert_close(compute(x, ids, scores, SMALL, SMALL), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_kernels")
@torch.inference_mode()
def test_a_model_with_experts_in_fp8(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Weights of experts take a byte each; steps of few tokens and of many, which run by the model's code, agree.
    Experts with biases keep floats, which the log says."""
    model = make_model(FAMILIES["qwen3_moe"]()).to(DEVICE)
    ids = torch.arange(3, 10, device=DEVICE)[None]
    exact = model(ids).logits
    assert fused_experts.install(model, in_fp8=True) == COUNTS["qwen3_moe"]
    kept = [one for one in model.modules() if hasattr(one, "gate_up_proj")]
    assert {one.gate_up_proj.element_size() + one.down_proj.element_size() for one in kept} == {2}
    few = model(ids).logits
    assert 0 < (few - exact).abs().max() < 0.2 * exact.abs().max()
    monkeypatch.setattr(fused_experts, "MAX_TOKENS", 2)
    torch.testing.assert_close(model(ids).logits, few, rtol=1e-4, atol=1e-4)
    assert {one.gate_up_proj.dtype for one in kept} == {torch.float8_e4m3fn}
    other = make_model(CASES["gpt_oss"]()).to(DEVICE)
    fused_experts.install(other, in_fp8=True)
    assert "keeps its weights as floats: experts with biases" in caplog.text


@pytest.mark.usefixtures("_kernels")
@torch.inference_mode()
def test_wrong_kernels_keep_floats(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Experts whose kernels are wrong in float8 alone run by them as floats, and the log says why."""
    model = make_model(FAMILIES["qwen3_moe"]()).to(DEVICE)
    ids = torch.arange(3, 10, device=DEVICE)[None]
    exact, few = model(ids).logits, Experts.few

    def wrong(self: Experts, *given: Any) -> Any:
        return given[0] if self.up_scale is not None else few(self, *given)

    monkeypatch.setattr(Experts, "few", wrong)
    assert fused_experts.install(model, in_fp8=True) == COUNTS["qwen3_moe"]
    torch.testing.assert_close(model(ids).logits, exact, rtol=1e-4, atol=1e-4)
    assert "Qwen3MoeExperts keeps its weights as floats: the kernel differs from the reference by" in caplog.text


@pytest.mark.usefixtures("_kernels")
@torch.inference_mode()
def test_experts_of_another_form_keep_their_code(caplog: Any) -> None:
    """Experts whose gates have an activation that no kernel knows are left to torch, which the log says."""
    config = tf.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2, hidden_act="relu")
    model = make_model(config).to(DEVICE)
    assert fused_experts.install(model) == 0
    assert "torch, not our kernels, computes MixtralExperts: its experts have another form" in caplog.text


@pytest.mark.usefixtures("_kernels")
@torch.inference_mode()
def test_wrong_kernels_are_not_used(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Kernels that do not run, or give something else than the module, are not used, and the log says why."""
    model = make_model(FAMILIES["mixtral"]()).to(DEVICE)

    def broken(*given: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(Experts, "few", broken)
    assert fused_experts.install(model) == 0
    assert "MixtralExperts: the kernel does not run: RuntimeError: no compiler" in caplog.text
    monkeypatch.setattr(Experts, "few", lambda self, x, ids, scores: x)
    assert fused_experts.install(model) == 0
    assert "MixtralExperts: the kernel differs from the reference by" in caplog.text


@torch.inference_mode()
def test_long_steps_run_by_the_modules_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of more tokens than the kernels take is computed by the module's own code."""
    module, experts = experts_of("mixtral")
    monkeypatch.setattr(fused_experts, "MAX_TOKENS", 3)
    assert experts.takes(*step(experts, 3, 2))
    x, ids, scores = step(experts, 4, 2)
    assert not experts.takes(x, ids, scores)
    assert not experts.takes(x[:3].half(), ids[:3], scores[:3])
    assert torch.equal(fused_experts.forward(experts, module.forward, x, ids, scores), module(x, ids, scores))


def test_nothing_is_replaced_without_a_device() -> None:
    """On CPU the model's own code runs."""
    assert fused_experts.install(make_model(FAMILIES["mixtral"]())) == 0
