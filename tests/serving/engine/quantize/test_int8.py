"""Weights of eight bits that are chosen by a model's activations."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers as tf
from engine_runs import run
from safetensors.torch import load_file
from tiny_models import COMMON, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.quantize import calibration
from mlflow_llm.serving.engine.quantize.weight_writer import quantize_files
from mlflow_llm.serving.engine.weights.quantization import quantize_rows, rotated
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings

TEXTS = [list(range(3, 60)), list(range(90, 20, -2))]


def test_rounding_follows_the_activations() -> None:
    """Calibrated values, with the scales of plain rounding, are closer to the layer's output."""
    torch.manual_seed(0)
    x = (torch.randn(400, 12) @ torch.randn(12, 160) + 0.1 * torch.randn(400, 160)) * torch.logspace(-1, 1, 160)
    weight = torch.randn(48, 160)
    values, scale = calibration.rounded_to_bytes(weight, x.t() @ x / len(x))
    plain, scales = quantize_rows(weight)
    assert (values.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert torch.equal(scale, scales)
    assert values.abs().max() <= 127
    wrong = [float(((some * scale - weight) @ x.t()).norm()) for some in (values, plain)]
    assert wrong[0] < 0.6 * wrong[1]


class OneLinear(torch.nn.Module):
    """A model of one linear, whose inputs are its tokens' rows of a table."""

    base_model_prefix = "body"

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table, self.linear = table, torch.nn.Linear(table.shape[1], 48, bias=False)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        return self.linear(self.table[input_ids])


@torch.no_grad()
def test_a_token_with_large_inputs_does_not_decide_alone() -> None:
    """A token with inputs that are a thousand times as large as the others' has one vote among them."""
    torch.manual_seed(0)
    table = torch.randn(300, 8) @ torch.randn(8, 64) + 0.1 * torch.randn(300, 64)
    table[0] = 1000 * torch.randn(64)
    model = OneLinear(table)
    weight, wrong = rotated(model.linear.weight), []
    for alike in (True, False):
        ((_, products, _),) = calibration.inputs_of(model, [[model.linear]], [list(range(300))], alike=alike)
        values, scale = calibration.rounded_to_bytes(weight, products)
        wrong.append(float(((values * scale - weight) @ rotated(table[1:]).t()).norm()))
    assert wrong[0] < 0.8 * wrong[1]


@pytest.mark.parametrize("products", [torch.zeros(32, 32), torch.ones(32, 32), torch.full((32, 32), 1e37)])
def test_uninformative_inputs_still_give_close_weights(products: torch.Tensor) -> None:
    """Inputs that are empty, constant or very large still round weights to close values."""
    weight = torch.randn(20, 32, generator=torch.Generator().manual_seed(1))
    values, scale = calibration.rounded_to_bytes(weight, products)
    assert float((values * scale - weight).norm() / weight.norm()) < 0.05


def test_a_calibrated_model_is_served(tmp_path: Path) -> None:
    """A model that was calibrated has other values in its linears than one that was not, and is served."""
    model = make_model(tf.LlamaConfig(**COMMON | {"hidden_size": 64}))
    whole = save_bundle(model, tmp_path / "whole")
    bundles = {}
    for name, texts in (("plain", []), ("calibrated", TEXTS)):
        shutil.copytree(whole.model_dir, tmp_path / name)
        quantize_files(tmp_path / name, ("completions",), "int8", texts)
        folder = str(tmp_path / name)
        bundles[name] = Bundle(content_hash=name, tasks=("completions",), model_dir=folder, tokenizer_dir="")
    plain, calibrated = (load_file(tmp_path / name / "model.safetensors") for name in bundles)
    assert plain.keys() == calibrated.keys()
    differing = {name for name, value in plain.items() if not torch.equal(value, calibrated[name])}
    assert {name for name, value in plain.items() if value.dtype == torch.int8} <= differing
    assert all("_proj.weight" in name or name == "lm_head.weight_inputs" for name in differing)
    settings = EngineSettings(kv_cache_memory=1 << 24, packed_cache=0, quantization="int8")
    core = EngineCore(bundles["calibrated"], settings)
    assert core.info.quantization == "int8"
    assert len(run(core, request_of("r", prompt_of(9, 3), max_tokens=4))["r"].tokens[0]) == 4
    core.close()
