"""Checkpoints that others quantised: read as they are, multiplied in four bits or float8, equal to what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from engine_runs import run
from safetensors.torch import load_file, save_file
from tiny_models import COMMON, make_model, prompt_of, request_of, save_bundle
from torch import nn

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.devices import triton_support
from mlflow_llm.serving.engine.models import loader
from mlflow_llm.serving.engine.native.weight import NativeWeight
from mlflow_llm.serving.engine.weights import int4, published
from mlflow_llm.serving.engine.weights.fp8 import Fp8Weight, why_not_kernel, why_not_one_kernel, why_not_scaled_mm
from mlflow_llm.serving.engine.weights.int4 import Int4Weight
from mlflow_llm.serving.engine.weights.quantization import Int8Weight
from mlflow_llm.serving.engine.weights.stored_weights import quantization_of
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings

CUDA = torch.cuda.is_available()
WIDE: dict[str, Any] = COMMON | {"hidden_size": 64, "intermediate_size": 128}
GROUP = 32


def words(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack values 0..15 [.., 8 J] into int32 [.., J]: number ``order[i]`` of eight at bits 4 i."""
    eights = values.long().unflatten(-1, (-1, 8))
    found = sum(eights[..., one] << (4 * i) for i, one in enumerate(order))
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int().contiguous()  # type: ignore[operator]


def grouped(make: torch.Generator, rows: int, columns: int, *, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Return random values [N, K], scales and zeros [N, groups], and the weights that they mean."""
    values = torch.randint(0, 16, (rows, columns), generator=make)
    shape = (rows, columns // GROUP)
    zero = torch.full(shape, 8) if symmetric else torch.randint(1, 16, shape, generator=make)
    scale = (torch.rand(shape, generator=make) * 0.02 + 0.01).half()
    weight = (values - zero.repeat_interleave(GROUP, 1)) * scale.float().repeat_interleave(GROUP, 1)
    return values, scale, zero, weight


def awq(make: torch.Generator, rows: int, columns: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    values, scale, zero, weight = grouped(make, rows, columns, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": words(values.t(), order), "qzeros": words(zero.t(), order), "scales": scale.t().contiguous()}
    return parts, weight


def gptq(
    make: torch.Generator, rows: int, columns: int, *, symmetric: bool = True, less: int = 1
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    values, scale, zero, weight = grouped(make, rows, columns, symmetric=symmetric)
    parts = {
        "qweight": words(values).t().contiguous(),
        "qzeros": words(zero.t() - less),
        "scales": scale.t().contiguous(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // GROUP,
    }
    return parts, weight


def packed(
    make: torch.Generator, rows: int, columns: int, *, symmetric: bool = True
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    values, scale, zero, weight = grouped(make, rows, columns, symmetric=symmetric)
    parts = {"weight_packed": words(values), "weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}
    if not symmetric:
        parts["weight_zero_point"] = words(zero.t()).t().contiguous()
    return parts, weight


def float8(
    make: torch.Generator, rows: int, columns: int, *, scales: int | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    values = (torch.randn(rows, columns, generator=make) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(scales or rows, generator=make) * 1e-3 + 5e-4
    return {"weight": values, "weight_scale": scale if scales else scale[:, None]}, values.float() * scale[:, None]


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
EIGHT = {"num_bits": 8, "type": "float", "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
FORMS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "awq": (AWQ, awq),
    "gptq": (GPTQ, gptq),
    "gptq asymmetric": (GPTQ | {"sym": False}, lambda *given: gptq(*given, symmetric=False)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda *given: gptq(*given, symmetric=False, less=0)),
    "packed": (compressed("pack-quantized", symmetric=True, **FOUR), packed),
    "packed asymmetric": (
        compressed("pack-quantized", symmetric=False, **FOUR), lambda *given: packed(*given, symmetric=False)
    ),
    "float8 by row": (compressed("float-quantized", strategy="channel", **EIGHT), float8),
    "float8": (compressed("float-quantized", strategy="tensor", **EIGHT), lambda *given: float8(*given, scales=1)),
}  # fmt: skip


def saved(name: str, folder: Path) -> tuple[Bundle, Bundle]:
    """Save a Llama in a published format, and the floats that it means; return both."""
    said, form = FORMS[name]
    make, model = torch.Generator().manual_seed(0), make_model(tf.LlamaConfig(**WIDE, attention_bias=True))
    stored: dict[str, torch.Tensor] = {}
    replaced = set()
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear) and path != "lm_head":
                parts, weight = form(make, *module.weight.shape)
                stored |= {f"{path}.{part}": value for part, value in parts.items()}
                module.weight.copy_(weight)
                replaced.add(f"{path}.weight")
    floats = save_bundle(model, folder / "floats")
    (folder / "stored").mkdir()
    config = json.loads((folder / "floats/config.json").read_text()) | {"quantization_config": said}
    (folder / "stored/config.json").write_text(json.dumps(config))
    kept = {key: value.contiguous() for key, value in model.state_dict().items() if key not in replaced} | stored
    save_file(kept, folder / "stored/model.safetensors", metadata={"format": "pt"})
    return floats, Bundle(
        content_hash="stored", tasks=("completions",), model_dir=str(folder / "stored"), tokenizer_dir=""
    )


def settings(bundle: Bundle, **more: Any) -> EngineSettings:
    found = quantization_of(bundle.model_dir)
    return EngineSettings(**{"quantization": found or "none", "kv_cache_memory": 1 << 24, "packed_cache": 0, **more})


def scores(bundle: Bundle, **more: Any) -> torch.Tensor:
    """Return the log probabilities of a prompt's tokens."""
    core = EngineCore(bundle, settings(bundle, **more))
    found = run(core, request_of("r", prompt_of(12, 3), max_tokens=1, prompt_logprobs=0))["r"]
    core.close()
    return torch.tensor([one.logprob for one in found.scored[0].logprobs if one is not None])


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run Triton's kernels, in its interpreter if there is no device."""
    pytest.importorskip("triton")
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)
    trials: tuple[Any, ...] = (int4.why_wrong, why_not_kernel, why_not_one_kernel, why_not_scaled_mm)
    for known in trials:
        known.cache_clear()
    yield
    for known in trials:
        known.cache_clear()


@pytest.mark.parametrize("name", FORMS)
def test_the_weights_are_what_the_file_means(name: str, tmp_path: Path) -> None:
    """Every format gives the weights that it means, to the bit; the head and the rest stay floats."""
    floats, stored = saved(name, tmp_path)
    loaded = loader.load_model(stored, settings(stored, kernels="torch", device="cpu")).linears.linears
    wanted = load_file(Path(floats.model_dir) / "model.safetensors")
    for path, linear in loaded.items():
        assert torch.equal(linear.weight, wanted[f"{path}.weight"]), path
        assert not isinstance(linear.group.packed, Int8Weight)
        assert isinstance(linear.group.packed, Fp8Weight) == (name.startswith("float8") and path != "lm_head")


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", ["gptq asymmetric", "float8"])
def test_an_engine_computes_with_them_as_they_are(name: str, tmp_path: Path) -> None:
    """With the kernels, a prompt's tokens score as with the floats that the file means."""
    floats, stored = saved(name, tmp_path)
    more = {"kernels": "torch", "device": "cuda" if CUDA else "cpu", "dtype": "float32"}
    linears = loader.load_model(stored, settings(stored, **more)).linears.linears
    kind = Fp8Weight if name == "float8" else Int4Weight
    assert all(isinstance(one.group.packed, kind) for path, one in linears.items() if path != "lm_head")
    found, wanted = scores(stored, **more), scores(floats, **more)
    assert (found - wanted).abs().max() < 1e-3


@pytest.mark.skipif(CUDA, reason="our native kernels are for CPUs")
def test_native_kernels_multiply_four_bits(tmp_path: Path) -> None:
    """On CPU our native kernels multiply the four bits in groups of 32."""
    floats, stored = saved("gptq asymmetric", tmp_path)
    loaded = loader.load_model(stored, settings(stored))
    linears = loaded.linears.linears
    found = linears["model.layers.0.mlp.down_proj"]
    assert isinstance(found.group.packed, NativeWeight)
    wanted = load_file(Path(floats.model_dir) / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    torch.testing.assert_close(found.weight, wanted, rtol=1e-3, atol=1e-4)
    assert (scores(stored) - scores(floats)).abs().mean() < 0.1


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 17, 64, 70])
def test_products_of_four_bits(group: int, rows: int) -> None:
    """Groups of each size, rows of few and of many, with and without a bias, give the product of the floats."""
    device = torch.device("cuda" if CUDA else "cpu")
    make = torch.Generator().manual_seed(rows)
    values = torch.randint(0, 16, (70, 1024), dtype=torch.uint8, generator=make)
    zero = torch.randint(0, 16, (70, 1024 // group), dtype=torch.uint8, generator=make)
    scale = torch.rand(70, 1024 // group, generator=make).half()
    exact = ((values.float().unflatten(1, (-1, group)) - zero[..., None]) * scale.float()[..., None]).flatten(1)
    x = torch.randn(rows, 1024, generator=make).to(device)
    for bias in (None, torch.randn(70, generator=make).to(device)):
        weight = Int4Weight(values, scale, zero, bias, torch.float32, device)
        assert torch.equal(weight.dense().cpu(), exact)
        wanted = torch.nn.functional.linear(x, exact.to(device), bias)
        torch.testing.assert_close(weight.matmul(x), wanted, rtol=1e-3, atol=1e-2)
        assert not weight.finished.any()


def test_groups_that_no_kernel_takes_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """Groups of 24 inputs are no multiple of what the kernel reads at once; that they become floats is logged once."""
    assert int4.chunk_of(24) == 0
    assert int4.chunk_of(128) == int4.chunk_of(4096) == 128
    assert int4.why_not(torch.device("cpu"), torch.float32, 128) == "there is no CUDA device"
    int4.report.cache_clear()
    int4.report("groups of 24")
    int4.report("groups of 24")
    assert [one.message for one in caplog.records] == ["int4: weights of four bits are made floats: groups of 24"]


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (AWQ | {"bits": 8}, "bits: 8 is not allowed; expected 4"),
        (AWQ | {"version": "gemv"}, "version: 'gemv' is not allowed; expected 'gemm'"),
        (GPTQ | {"bits": 3}, "bits: 3 is not allowed"),
        (GPTQ | {"group_size": 12}, "group_size: 12 is not allowed; expected -1, or a multiple of 8"),
        (GPTQ | {"dynamic": {"-:lm_head": {}}}, "dynamic: .* is not allowed"),
        (compressed("pack-quantized", **FOUR | {"num_bits": 8}), r"config_groups.group_0.weights.num_bits: 8"),
        (compressed("float-quantized", strategy="block", **EIGHT), r"weights.strategy: 'block' is not allowed"),
        (compressed("float-quantized", strategy="channel", **EIGHT) | {"config_groups": 3}, "config_groups: 3"),
    ],
)  # fmt: skip
def test_other_variants_are_refused_by_name(said: dict[str, Any], match: str) -> None:
    """A variant that is not supported is refused by the entry, its value and what is allowed."""
    with pytest.raises(PackagingError, match=match):
        published.published_of(said)


def reordered(tensors: dict[str, Any]) -> None:
    name = "model.layers.1.mlp.up_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()


def lose_zeros(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.1.mlp.up_proj.qzeros"]


def cut(tensors: dict[str, Any]) -> None:
    name = "model.layers.1.mlp.up_proj.qweight"
    tensors[name] = tensors[name][:-1].contiguous()


def unknown(tensors: dict[str, Any]) -> None:
    tensors["model.layers.1.mlp.experts.0.qweight"] = torch.zeros(8, 8, dtype=torch.int32)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (reordered, r"up_proj.g_idx: inputs in another order .*desc_act or actorder off"),
        (lose_zeros, "lack model.layers.1.mlp.up_proj.qzeros"),
        (cut, r"up_proj.qweight: torch.int32 of shape \(7, 128\) is not allowed; config.json gives torch.int32 of"),
        (unknown, "experts.0 is quantised in the weights; expected only linears of the model"),
    ],
)
def test_damaged_checkpoints_are_refused(damage: Callable[[Any], None], match: str, tmp_path: Path) -> None:
    """Inputs in act-order and damaged tensors are refused by the tensor's name."""
    stored = saved("gptq", tmp_path)[1]
    tensors = load_file(Path(stored.model_dir) / "model.safetensors")
    damage(tensors)
    save_file(tensors, Path(stored.model_dir) / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PackagingError, match=match):
        EngineCore(stored, settings(stored))
