"""Conversion of peft's adapters to the form in which TensorRT-LLM's clients send them with a request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from mlflow_llm.serving.interface.request import LoraTask

IDS = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "down_proj": 6, "up_proj": 7}
MODULE = re.compile(r".*\.(\d+)\.[\w.]*?(\w+)\.lora_A\.weight")


def task_of(folder: str | Path, task_id: int, *, columns: int = 3, base: Mapping[str, Any] | None = None) -> LoraTask:
    """Return the adapter of ``folder`` (no patterns): scaling in B, rows padded to the longest. DoRA's magnitudes are
    divided by the norms of the weights of ``base``, by name, with the adapter's in them."""
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    rows, shapes = [], []
    for key, a in tensors.items():
        match = MODULE.fullmatch(key)
        if match is None:
            continue
        rank = a.shape[0]
        scaling = config["lora_alpha"] / (np.sqrt(rank) if config["use_rslora"] else rank)
        b = tensors[key.replace("lora_A", "lora_B")] * scaling
        parts = [a.ravel(), b.ravel()]
        if base is not None:
            module = key.removesuffix(".lora_A.weight")
            adapted = base[f"{module.removeprefix('base_model.model.')}.weight"].numpy() + b @ a
            parts.append(tensors[f"{module}.lora_magnitude_vector"] / np.linalg.norm(adapted, axis=1))
        rows.append(np.concatenate(parts))
        shapes.append((IDS[match[2]], int(match[1]), rank, int(base is not None))[:columns])
    width = max(map(len, rows))
    weights = np.stack([np.pad(row, (0, width - len(row))) for row in rows]).astype("<f4")
    return LoraTask(task_id=task_id, weights=weights.tobytes(), config=tuple(shapes))
