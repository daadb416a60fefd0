"""LoRA tasks: adapters that come with a request in TensorRT-LLM's format, read as factors of a model's linears.

    lora_config    a row [module_id, layer, rank] or [module_id, layer, rank, is_dora] for each row of weights
    lora_weights   [rows, width], each row: A [rank, in], B [out, rank], with DoRA then m / |W + B A| by row [out], and
                   zeros up to the width

B already contains the scaling, and the magnitudes m are already divided by the norms: TensorRT-LLM's
normalize_weights.py does that to peft's weights. A module id names a linear by its role in the layer, whatever the
model calls it. If a model has separate q, k and v, id 0, the fused q, k and v, is one A with three Bs. In gated MLPs
id 5 is the linear whose output goes through the activation (peft's ``gate_proj``) and id 7 is ``up_proj``, contrary to
what their names in TensorRT-LLM, ``mlp_h_to_4h`` and ``mlp_gate``, suggest.
The format: https://nvidia.github.io/TensorRT-LLM/advanced/lora.html
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...interface.errors import InvalidField
from ...interface.request import LoraTask
from .lora_plan import Factors

# Module names in a layer by TensorRT-LLM's ids; the first name that the layer has counts.
MODULES: dict[int, tuple[str, ...]] = {
    0: ("self_attn.qkv_proj", "attn.c_attn"),
    1: ("self_attn.q_proj", "attn.q_proj"),
    2: ("self_attn.k_proj", "attn.k_proj"),
    3: ("self_attn.v_proj", "attn.v_proj"),
    4: ("self_attn.o_proj", "self_attn.out_proj", "self_attn.dense", "attn.c_proj", "attn.out_proj", "attention.dense"),
    5: ("mlp.gate_proj", "mlp.c_fc", "mlp.fc1", "mlp.fc_in", "mlp.dense_h_to_4h", "fc1"),
    6: ("mlp.down_proj", "mlp.c_proj", "mlp.fc2", "mlp.fc_out", "mlp.dense_4h_to_h", "fc2"),
    7: ("mlp.up_proj",),
}
QKV = 0
NAMES = ("attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate")
LAYER = re.compile(r"(?P<prefix>(?:\w+\.)*?)(?P<layer>\d+)\.(?P<module>[\w.]+)")


@dataclass(frozen=True, slots=True)
class TaskWeights:
    """A task's weights for this model: ``factors`` by module name, with DoRA a ``gain`` but no ``shift`` yet, and their
    largest ``rank``."""

    factors: dict[str, Factors]
    rank: int


Target = list[tuple[str, int, int]]
"""The linears that share a row of weights: module name, first and last of its rows of B."""


class TaskReader:
    """A reader of tasks for linears with these ``shapes`` (out, in) by module name."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        self._shapes = shapes
        self._layers: dict[int, dict[str, str]] = {}  # module names by layer and name within it
        for name in shapes:
            match = LAYER.fullmatch(name)
            if match is not None:
                self._layers.setdefault(int(match["layer"]), {})[match["module"]] = name

    def read(self, task: LoraTask) -> TaskWeights:
        """Read a task's weights. Raises ``InvalidField``, which names the row that does not fit the model."""
        assert task.weights is not None
        assert task.config is not None
        rows = len(task.config)
        if not rows or not task.weights or len(task.weights) % (4 * rows):
            raise InvalidField("lora_weights", f"{len(task.weights)} bytes", f"as many rows as lora_config has, {rows}")
        weights = np.frombuffer(task.weights, dtype="<f4").reshape(rows, -1)
        if not np.isfinite(weights).all():
            raise InvalidField("lora_weights", "nan or inf", "finite numbers")
        factors: dict[str, Factors] = {}
        for i, row in enumerate(task.config):
            for name, made in self._row(i, row, weights[i]).items():
                if name in factors:
                    allowed = f"each module only once: {name} already has an adapter"
                    raise InvalidField(f"lora_config[{i}]", list(row), allowed)
                factors[name] = made
        return TaskWeights(factors, max(one.rank for one in factors.values()))

    def _row(self, index: int, row: tuple[int, ...], weights: npt.NDArray[np.float32]) -> dict[str, Factors]:
        field = f"lora_config[{index}]"
        if len(row) not in (3, 4):
            raise InvalidField(field, list(row), "[module_id, layer_idx, adapter_size], or is_dora too")
        module, layer, rank = row[:3]
        if row[3:] not in ((), (0,), (1,)):
            raise InvalidField(f"{field}[3]", row[3], "0, or 1 for DoRA")
        is_dora = row[3:] == (1,)
        target = self._target(field, module, layer)
        inputs = self._shapes[target[0][0]][1]
        outputs = target[-1][2]
        if not 1 <= rank <= min(inputs, outputs):
            raise InvalidField(f"{field}[2]", rank, f"an adapter size from 1 to {min(inputs, outputs)}")
        factors, size = rank * (inputs + outputs), rank * (inputs + outputs) + outputs * is_dora
        wanted = f"A [{rank}, {inputs}] and B [{outputs}, {rank}]" + f" and magnitudes [{outputs}]" * is_dora
        if len(weights) < size:
            wanted = f"{size} numbers or more: {wanted}"
            raise InvalidField(f"lora_weights[{index}]", f"{len(weights)} numbers", wanted)
        if weights[size:].any():
            allowed = f"zeros there: {wanted} take {size} numbers"
            raise InvalidField(f"lora_weights[{index}]", f"numbers after {size}", allowed)
        a = torch.from_numpy(weights[: rank * inputs].reshape(rank, inputs).copy())
        b = torch.from_numpy(weights[rank * inputs : factors].reshape(outputs, rank).copy())
        gain = torch.from_numpy(weights[factors:size].copy()) if is_dora else None
        return {
            name: Factors(a, b[first:last], 1.0, None if gain is None else gain[first:last])
            for name, first, last in target
        }

    def _target(self, field: str, module: int, layer: int) -> Target:
        known = self._layers.get(layer)
        if known is None:
            raise InvalidField(f"{field}[1]", layer, f"a layer from 0 to {len(self._layers) - 1}")
        name = next((known[one] for one in MODULES.get(module, ()) if one in known), None)
        if name is not None:
            return [(name, 0, self._shapes[name][0])]
        parts = (
            [self._target(field, one, layer)[0] for one in (1, 2, 3)] if module == QKV and self._is_apart(known) else []
        )
        if not parts:
            has = ", ".join(f"{i} ({one})" for i, one in enumerate(NAMES) if self._has(known, i))
            raise InvalidField(f"{field}[0]", module, f"a module of this model's layers: {has or 'none'}")
        joined: Target = []
        at = 0
        for part, _, size in parts:
            joined.append((part, at, at + size))
            at += size
        return joined

    def _has(self, known: Mapping[str, str], module: int) -> bool:
        return any(one in known for one in MODULES[module]) or (module == QKV and self._is_apart(known))

    def _is_apart(self, known: Mapping[str, str]) -> bool:
        return all(any(one in known for one in MODULES[part]) for part in (1, 2, 3))


def digest(task: LoraTask) -> bytes:
    """Return a digest of a task's weights, to recognise them."""
    assert task.weights is not None
    assert task.config is not None
    made = hashlib.blake2b(repr(task.config).encode(), digest_size=32)
    made.update(task.weights)
    return made.digest()
