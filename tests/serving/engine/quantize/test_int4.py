"""Weights of four bits: the kernel beside its definition, and models stored in four bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from engine_runs import run
from safetensors.torch import load_file
from tiny_models import COMMON, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.devices import openmp
from mlflow_llm.serving.engine.native import library
from mlflow_llm.serving.engine.native.weight import NativeWeight
from mlflow_llm.serving.engine.quantize import calibration, sensitivity, weight_writer
from mlflow_llm.serving.engine.quantize.weight_writer import quantize_files
from mlflow_llm.serving.engine.weights import stored_weights
from mlflow_llm.serving.engine.weights.quantization import rotated
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings

WIDE: dict[str, Any] = COMMON | {"hidden_size": 64}


@pytest.fixture(scope="module", autouse=True)
def all_in_four() -> Iterator[None]:
    """Quantise every linear to four bits at any cost, because random weights lose much by it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_writer, "MAX_LOSS_NATS", float("inf"))
        yield


def weight_of(rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """Return random values, scales, zero points, input factors and biases."""
    torch.manual_seed(rows)
    groups = columns // library.GROUP_SIZE
    values = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    zero = torch.randint(0, 16, (rows, groups), dtype=torch.uint8)
    return values, (torch.rand(rows, groups) * 0.1).half(), zero, torch.rand(columns) + 0.5, torch.randn(rows)


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("shape", [(96, 64), (50, 96), (33, 32), (200, 352)])
@pytest.mark.usefixtures("instructions")
def test_the_kernel_equals_its_definition(shape: tuple[int, int], is_rotated: bool) -> None:
    """Products are those of int8 activations, summed by group; a row's product and its parts are the same alone and in
    any batch, and the weights can be read back."""
    values, scale, zero, inputs, bias = weight_of(*shape)
    weight = NativeWeight.of_int4(values, scale, zero, inputs, bias, is_rotated=is_rotated)
    exact = (values.view(*scale.shape, -1).double() - zero[..., None]) * scale[..., None].double()
    dense = exact.flatten(1).float() * inputs
    assert torch.equal(weight.dense(), rotated(dense) if is_rotated else dense)
    x = torch.randn(29, shape[1])
    scaled = (rotated(x) if is_rotated else x) * inputs
    row_scale = (scaled.abs().amax(-1, keepdim=True) * (1 / 127)).clamp_min(1e-12)
    rounded = (scaled * row_scale.reciprocal()).round()
    wanted = rounded.double() @ exact.flatten(1).t() * row_scale.double() + bias.double()
    found = weight.matmul(x)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.cat([weight.matmul(row[None]) for row in x]), found)
    assert torch.equal(weight.matmul(x[3:16]), found[3:16])
    mapped = NativeWeight.over(shape, weight.kind, {name: part.copy() for name, part in weight.parts().items()})
    assert torch.equal(mapped.matmul(x), found)
    x[5, 7] = torch.inf
    strange = weight.matmul(x)
    assert strange[5].isnan().all()
    assert torch.equal(strange[6:], found[6:])


def test_rounding_follows_the_activations() -> None:
    """Calibrated rounding is closer to the layer's output than rounding each weight by itself."""
    torch.manual_seed(0)
    x = (torch.randn(400, 12) @ torch.randn(12, 64) + 0.1 * torch.randn(400, 64)) * torch.logspace(-1, 1, 64)
    weights = [torch.randn(48, 64), torch.randn(16, 64)]
    products, sizes = x.t() @ x / len(x), x.abs().mean(0)
    made = calibration.quantised(weights, products, sizes)
    plain = calibration.quantised(weights, torch.eye(64), torch.ones(64))
    for weight, chosen, other in zip(weights, made, plain, strict=True):
        wrong = [float(((dense(one) - weight) @ x.t()).norm() / (weight @ x.t()).norm()) for one in (chosen, other)]
        assert wrong[0] < 0.8 * wrong[1] < 0.1
    assert torch.equal(made[0].inputs, made[1].inputs)


def test_sweeps_leave_less_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further sweep over rounded values and scales reduces the error of the layer's output."""
    torch.manual_seed(0)
    x = (torch.randn(400, 12) @ torch.randn(12, 64) + 0.1 * torch.randn(400, 64)) * torch.logspace(-1, 1, 64)
    weight, products, sizes = torch.randn(48, 64), x.t() @ x / len(x), x.abs().mean(0)
    wrong = []
    for sweeps in (0, 1, 3):
        monkeypatch.setattr(calibration, "NUM_SWEEPS", sweeps)
        (made,) = calibration.quantised([weight], products, sizes)
        wrong.append(float(((dense(made) - weight) @ x.t()).norm()))
    assert wrong[2] < wrong[1] < wrong[0]
    assert wrong[2] < 0.95 * wrong[0]


def dense(one: calibration.GroupedWeight) -> torch.Tensor:
    grouped = one.values.view(*one.scale.shape, -1).float() - one.zero[..., None].float()
    return (grouped * one.scale[..., None].float()).flatten(1) * one.inputs


@pytest.mark.parametrize(
    "products", [torch.zeros(32, 32), torch.ones(32, 32), torch.full((32, 32), 1e30), torch.full((32, 32), 1e37)]
)
def test_uninformative_inputs_still_give_close_weights(products: torch.Tensor) -> None:
    """Calibration inputs that are empty, constant or very large still round weights to close values."""
    weight = torch.randn(20, 32, generator=torch.Generator().manual_seed(1))
    (made,) = calibration.quantised([weight], products, products.diagonal())
    assert float((dense(made) - weight).norm() / weight.norm()) < 0.5
    (nothing,) = calibration.quantised([torch.zeros(20, 32)], products, products.diagonal())
    assert not dense(nothing).any()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Bundle]:
    """Save a tiny model in full precision, and in four bits calibrated on its own text."""
    root = tmp_path_factory.mktemp("int4")
    config = tf.LlamaConfig(**WIDE, attention_bias=True)
    whole = save_bundle(make_model(config), root / "whole")
    shutil.copytree(whole.model_dir, root / "stored")
    quantize_files(root / "stored", ("completions",), "int4")
    return whole, Bundle(content_hash="q", tasks=("completions",), model_dir=str(root / "stored"), tokenizer_dir="")


def scores(bundle: Bundle, **settings: Any) -> torch.Tensor:
    core = EngineCore(bundle, EngineSettings(kv_cache_memory=1 << 24, packed_cache=0, **settings))
    found = run(core, request_of("r", prompt_of(60, 3), max_tokens=1, prompt_logprobs=0))["r"].scored[0]
    core.close()
    return torch.tensor([one.logprob for one in found.logprobs if one is not None])


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_model_in_four_bits(models: tuple[Bundle, Bundle], kernels: str) -> None:
    """A model in four bits runs by native kernels and by torch, and scores texts close to the original."""
    wanted, found = scores(models[0]), scores(models[1], quantization="int4", kernels=kernels)
    assert (found - wanted).abs().mean() < 0.25 * wanted.abs().mean()


def test_a_token_is_the_same_in_any_batch(models: tuple[Bundle, Bundle]) -> None:
    """Greedy texts are those of each request alone, whatever shares their steps."""
    settings = EngineSettings(
        quantization="int4", kv_cache_memory=1 << 24, packed_cache=0, max_num_batched_tokens=16, prefix_caching=False
    )
    core = EngineCore(models[1], settings)
    requests = [request_of(str(n), prompt_of(n, n)) for n in (5, 37, 1, 12)]
    together = run(core, *requests)
    for request in requests:
        assert run(core, request)[request.request_id].tokens == together[request.request_id].tokens
    core.close()


def test_stored_tensors_of_four_bits(models: tuple[Bundle, Bundle], tmp_path: Path) -> None:
    """Linears are stored as two values a byte with half-precision scales, those whose width is no multiple of a group
    as int8; the same model gives the same files."""
    found = load_file(Path(models[1].model_dir) / "model.safetensors")
    parts = {name.rpartition(".")[2]: value for name, value in found.items() if ".0.mlp.up_proj." in name}
    shapes = {name: (value.dtype, tuple(value.shape)) for name, value in parts.items()}
    assert shapes == {
        "weight_packed": (torch.uint8, (48, 32)),
        "weight_scale": (torch.float16, (48, 2)),
        "weight_zero": (torch.uint8, (48, 2)),
        "weight_inputs": (torch.float32, (64,)),
    }
    in_four = {name for name in found if name.endswith("weight_packed")}
    assert {name.split(".")[2] for name in in_four} == {"0", "1"}
    assert any(".o_proj." in name for name in in_four)
    assert found["model.layers.0.mlp.down_proj.weight"].dtype == torch.int8
    assert stored_weights.quantization_of(models[1].model_dir) == "int4"
    shutil.copytree(models[0].model_dir, tmp_path / "again")
    quantize_files(tmp_path / "again", ("completions",), "int4")
    first, second = (Path(folder) / "model.safetensors" for folder in (models[1].model_dir, tmp_path / "again"))
    assert first.read_bytes() == second.read_bytes()


def quantised_tensors(model: tf.PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    bundle = save_bundle(model, folder)
    quantize_files(Path(bundle.model_dir), ("completions",), "int4")
    return load_file(Path(bundle.model_dir) / "model.safetensors")


def test_the_most_sensitive_linears_get_eight_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The linears whose four-bit loss is too high get eight bits, siblings together, and never those whose outputs
    change nothing."""
    model = make_model(tf.LlamaConfig(**WIDE | {"intermediate_size": 96}))
    model.model.layers[0].mlp.down_proj.weight.data.zero_()
    estimated: list[float] = []
    chosen: set[int] = set()
    worst = sensitivity.worst

    def noted(costs: Sequence[float], sizes: Sequence[int], loss: float) -> set[int]:
        estimated[:] = costs
        chosen.clear()
        chosen.update(worst(costs, sizes, loss))
        return chosen

    monkeypatch.setattr(sensitivity, "worst", noted)
    all_four = quantised_tensors(model, tmp_path / "all")
    could = {name for name in all_four if name.endswith("weight_packed")}
    assert len(could) == 2 * 7  # all linears of either layer
    assert all_four["model.layers.0.self_attn.o_proj.weight_packed"].dtype == torch.uint8
    loss = sum(estimated) / 2
    monkeypatch.setattr(weight_writer, "MAX_LOSS_NATS", loss)
    found = quantised_tensors(model, tmp_path / "half")
    eight = {name for name in could if name not in found}
    assert 0 < len(eight) < len(could)
    left = sum(cost for i, cost in enumerate(estimated) if i not in chosen)
    assert left <= loss < left + max(estimated[i] for i in chosen)
    assert not [name for name in eight if "layers.0.mlp." in name]
    for name in eight:
        assert found[name.replace("weight_packed", "weight")].dtype == torch.int8
    for names in (("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj")):
        layers = [{name.split(".")[2] for name in eight if one in name} for one in names]
        assert layers.count(layers[0]) == len(names)
    for name in could - eight:
        assert torch.equal(found[name], all_four[name])


@pytest.mark.parametrize("before", [False, True])
def test_threads_do_not_spin_beside_others(before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads do not spin while other processes use the CPUs, and spin again afterwards."""
    waits: list[bool] = []

    class Oversubscribed:
        def __init__(self, changed: Callable[[bool], None]) -> None:
            self.changed = changed

        def look(self) -> None:
            oversubscribed = len(waits) % 3 == 1
            self.changed(oversubscribed)
            waits.append(openmp.waiting.brief)
            assert openmp.waiting.brief == (before or oversubscribed)

    waiting = openmp.Waiting()
    monkeypatch.setattr(waiting, "asked", False)
    monkeypatch.setattr(openmp, "waiting", waiting)
    monkeypatch.setattr(weight_writer, "Contention", Oversubscribed)
    waiting.set_brief(before)
    quantised_tensors(make_model(tf.LlamaConfig(**WIDE)), tmp_path / "model")
    assert len(waits) > 2 * 3
    assert waiting.brief is before
    waiting.set_brief(False)


def test_gradients_are_those_of_a_tokens_loss() -> None:
    """Squared gradients equal finite differences of a bias, on a text with a single predicted token."""
    model = make_model(tf.LlamaConfig(**WIDE, attention_bias=True)).double().requires_grad_(False)
    linear = model.model.layers[0].self_attn.o_proj
    (found,) = sensitivity.squared_gradients(model, [linear], [[5, 6]])
    for n in (0, 9, 63):
        losses = []
        for step in (0.01, -0.02):
            linear.bias[n] += step
            losses.append(float(model(torch.tensor([[5, 6]])).logits[0, 0].log_softmax(-1)[6]))
        linear.bias[n] += 0.01
        slope = (losses[0] - losses[1]) / 0.02
        assert float(found[n]) == pytest.approx(slope**2 / 2, rel=0.01)  # averaged over two tokens


def test_linears_with_the_highest_cost_for_their_size_are_chosen() -> None:
    """Linears are chosen by cost per size until the remaining loss is within the limit."""
    costs, sizes = [6.0, 1.0, 5.0, 0.5], [60, 5, 25, 10]
    assert sensitivity.worst(costs, sizes, 12.5) == set()
    assert sensitivity.worst(costs, sizes, 12.4) == {1}
    assert sensitivity.worst(costs, sizes, 6.5) == {1, 2}
    assert sensitivity.worst(costs, sizes, 0.5) == {0, 1, 2}
    assert sensitivity.worst(costs, sizes, 0.0) == {0, 1, 2, 3}
    assert sensitivity.worst([0.0, 1.0], [1, 1], 0.0) == {1}
    assert sensitivity.cost_of(torch.ones(2, 3), torch.eye(3), torch.tensor([1.0, 3.0])) == 6.0


@pytest.mark.parametrize(("at_once", "of_model", "runs"), [(1, 1 << 40, 4), (1 << 30, 8, 1), (1, 1, 1)])
def test_inputs_are_collected_in_few_runs(
    at_once: int, of_model: int, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs are collected for as many layers at once as a share of the model or a byte limit allows, with equal
    results."""
    model = make_model(tf.LlamaConfig(**WIDE)).requires_grad_(False)
    groups = [[layer.self_attn.o_proj] for layer in model.model.layers] + [
        [layer.mlp.gate_proj, layer.mlp.up_proj] for layer in model.model.layers
    ]
    texts = [list(range(3, 40)), [5, 6]]
    wanted = list(calibration.inputs_of(model, groups, texts))
    monkeypatch.setattr(calibration, "MAX_HESSIAN_BYTES", at_once)
    monkeypatch.setattr(calibration, "MODEL_DIVISOR", of_model)
    calls: list[Any] = []
    model.model.register_forward_pre_hook(lambda *call: calls.append(call))
    found = list(calibration.inputs_of(model, groups, texts))
    assert len(calls) == runs * len(texts)
    for one, other in zip(found, wanted, strict=True):
        assert one[0] is other[0]
        assert torch.equal(one[1], other[1])
        assert torch.equal(one[2], other[2])


def test_a_bos_token_beyond_the_vocabulary_is_ignored() -> None:
    """A BOS token beyond the vocabulary is ignored, as if the configuration named none."""
    model = make_model(tf.LlamaConfig(**WIDE)).requires_grad_(False)
    vocabulary = model.get_input_embeddings().num_embeddings
    texts = []
    for first in (None, vocabulary, 7):
        model.config.bos_token_id = first
        texts.append(calibration.own_text(model))
    assert texts[0] == texts[1] != texts[2]
    assert {text[0] for text in texts[2]} == {7}


def test_a_model_without_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model without gradients gets four bits everywhere, and the log says that sensitivity was not estimated."""
    forward = tf.LlamaForCausalLM.forward
    monkeypatch.setattr(tf.LlamaForCausalLM, "forward", torch.no_grad()(forward))
    found = quantised_tensors(make_model(tf.LlamaConfig(**WIDE)), tmp_path / "model")
    assert sum(name.endswith("weight_packed") for name in found) == 2 * 6
    assert "layer sensitivity could not be estimated; all layers get 4 bits" in caplog.text


def test_int4_is_refused_for_models_logged_without_it(models: tuple[Bundle, Bundle]) -> None:
    """int4 is refused by name for a model that was not logged in four bits."""
    with pytest.raises(PackagingError, match="quantization: 'int4' is not allowed; expected 'none' or 'int8'"):
        EngineCore(models[0], EngineSettings(quantization="int4"))
