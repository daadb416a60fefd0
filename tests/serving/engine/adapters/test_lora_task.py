"""LoRA tasks sent with a request in TensorRT-LLM's format: how they map to a model, and which are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mlflow_llm.serving.engine.adapters.lora_task import TaskReader
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.request import LoraTask

APART = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(2)
    for name, shape in {
        "self_attn.q_proj": (8, 6),
        "self_attn.k_proj": (4, 6),
        "self_attn.v_proj": (4, 6),
        "self_attn.o_proj": (6, 8),
        "mlp.gate_proj": (10, 6),
        "mlp.up_proj": (10, 6),
        "mlp.down_proj": (6, 10),
    }.items()
}
FUSED = {"transformer.h.0.attn.c_attn": (18, 6), "transformer.h.0.attn.c_proj": (6, 6), "lm_head": (50, 6)}


def rows(*config: tuple[int, ...], width: int = 100, shapes: dict[int, tuple[int, int]]) -> tuple[LoraTask, list]:
    """Return a task of random factors, and those factors; ``shapes`` is (out, in) by module id."""
    random = np.random.default_rng(0)
    factors, weights = [], np.zeros((len(config), width), dtype="<f4")
    for i, (module, _, rank, *_) in enumerate(config):
        out, inputs = shapes[module]
        a, b = random.normal(size=(rank, inputs)).astype("<f4"), random.normal(size=(out, rank)).astype("<f4")
        weights[i, : a.size + b.size] = np.concatenate([a.ravel(), b.ravel()])
        factors.append((torch.from_numpy(a), torch.from_numpy(b)))
    return LoraTask(task_id=7, weights=weights.tobytes(), config=tuple(config)), factors


def test_module_ids_name_the_linears_of_a_layer() -> None:
    """Module ids 1 to 4 are attention's, 5 is the gate, 6 down and 7 up; each has its own rank."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj")
    found = {name.rsplit(".", 1)[1]: shape for name, shape in APART.items()}
    config = [(i, i % 2, 1 + i % 3) for i in range(1, 8)]
    task, factors = rows(*config, shapes={i + 1: found[name] for i, name in enumerate(names)})
    read = TaskReader(APART).read(task)
    assert read.rank == 3
    assert {name.rsplit(".", 1)[1] for name in read.factors} == set(names)
    for (module, layer, _), (a, b) in zip(config, factors, strict=True):
        name = names[module - 1]
        part = "self_attn" if module < 5 else "mlp"
        one = read.factors[f"model.layers.{layer}.{part}.{name}"]
        assert torch.equal(one.a, a)
        assert torch.equal(one.b, b)
        assert one.scaling == 1.0


def test_fused_qkv_is_one_a_and_the_rows_of_three_bs() -> None:
    """Module 0 (fused QKV) is split for a model with separate q, k and v, and kept whole for a fused one."""
    task, [(a, b)] = rows((0, 1, 2), shapes={0: (16, 6)})
    factors = TaskReader(APART).read(task).factors
    parts = [factors[f"model.layers.1.self_attn.{name}_proj"] for name in "qkv"]
    assert torch.equal(torch.cat([one.b for one in parts]), b)
    assert all(torch.equal(one.a, a) for one in parts)
    task, [(a, b)] = rows((0, 0, 2, 0), shapes={0: (18, 6)})
    one = TaskReader(FUSED).read(task).factors["transformer.h.0.attn.c_attn"]
    assert torch.equal(one.a, a)
    assert torch.equal(one.b, b)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([(9, 0, 1)], "lora_config[0][0]: 9 is not allowed; expected a module of this model's layers: 0 (attn_qkv), 1"),
        ([(-1, 0, 1)], "lora_config[0][0]: -1"),
        ([(1, 2, 1)], "lora_config[0][1]: 2 is not allowed; expected a layer from 0 to 1"),
        ([(1, -1, 1)], "lora_config[0][1]: -1"),
        ([(1, 0, 0)], "lora_config[0][2]: 0 is not allowed; expected an adapter size from 1 to 6"),
        ([(1, 0, 7)], "lora_config[0][2]: 7"),
        ([(1, 0, 1, 2)], "lora_config[0][3]: 2 is not allowed; expected 0, or 1 for DoRA"),
        ([(1, 0, 1, 0, 0)], "lora_config[0]: [1, 0, 1, 0, 0] is not allowed"),
        ([(1, 0, 1), (1, 0, 1)], "lora_config[1]: [1, 0, 1] is not allowed; expected each module only once"),
        ([(1, 0, 1), (0, 0, 1)], "lora_config[1]: [0, 0, 1] is not allowed; expected each module only once"),
    ],
)
def test_a_row_that_does_not_fit_the_model_is_named(config: list[tuple[int, ...]], message: str) -> None:
    """Unknown modules and layers, ranks out of bounds, invalid DoRA flags and duplicate modules are refused by row."""
    task = LoraTask(task_id=1, weights=np.zeros((len(config), 30), "<f4").tobytes(), config=tuple(config))
    with pytest.raises(InvalidField) as error:
        TaskReader(APART).read(task)
    assert error.value.message.startswith(message)


def test_the_fourth_column_says_that_magnitudes_come_after_b() -> None:
    """Magnitudes after B are read as gains, split for a fused row; without them the row is too short."""
    random = np.random.default_rng(0)
    values = random.normal(size=2 * 6 + 16 * 2 + 16).astype("<f4")
    task = LoraTask(task_id=1, weights=np.append(values, [0, 0]).astype("<f4").tobytes(), config=((0, 1, 2, 1),))
    factors = TaskReader(APART).read(task).factors
    parts = [factors[f"model.layers.1.self_attn.{name}_proj"] for name in "qkv"]
    assert torch.equal(torch.cat([one.gain for one in parts if one.gain is not None]), torch.from_numpy(values[44:]))
    assert torch.equal(torch.cat([one.b for one in parts]), torch.from_numpy(values[12:44].reshape(16, 2)))
    with pytest.raises(InvalidField, match=r"44 numbers.* expected 60 numbers or more: .* and magnitudes \[16\]"):
        TaskReader(APART).read(LoraTask(task_id=1, weights=values[:44].tobytes(), config=((0, 1, 2, 1),)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros(13), "lora_weights[0]: '13 numbers' is not allowed; expected 14 numbers or more: A [1, 6] and B [8"),
        (np.ones(15), "lora_weights[0]: 'numbers after 14' is not allowed; expected zeros there"),
        (np.full(14, np.nan), "lora_weights: 'nan or inf' is not allowed"),
    ],
)
def test_weights_of_another_length_are_refused(values: np.ndarray, message: str) -> None:
    """Weights too short for A and B, nonzero padding and values that are not finite are refused."""
    with pytest.raises(InvalidField) as error:
        TaskReader(APART).read(LoraTask(task_id=1, weights=values.astype("<f4").tobytes(), config=((1, 0, 1),)))
    assert error.value.message.startswith(message)


def test_a_model_without_known_layers_takes_no_task() -> None:
    """A model without numbered layers refuses tasks: the head, for one, has no module id."""
    with pytest.raises(InvalidField, match="lora_config"):
        TaskReader({"lm_head": (50, 6)}).read(LoraTask(task_id=1, weights=b"\0" * 64, config=((1, 0, 1),)))
