"""peft's adapters as TensorRT-LLM's clients send them with a request."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from mlflow_llm.serving.request import LoraTask

IDS = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "down_proj": 6, "up_proj": 7}
MODULE = re.compile(r".*\.(\d+)\.[\w.]*?(\w+)\.lora_A\.weight")


def task_of(folder: str | Path, task_id: int, *, columns: int = 3) -> LoraTask:
    """The adapter of ``folder`` (no patterns): scaling in B, rows padded to the longest."""
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
        rows.append(np.concatenate([a.ravel(), b.ravel()]))
        shapes.append((IDS[match[2]], int(match[1]), rank, 0)[:columns])
    width = max(map(len, rows))
    weights = np.stack([np.pad(row, (0, width - len(row))) for row in rows]).astype("<f4")
    return LoraTask(task_id=task_id, weights=weights.tobytes(), config=tuple(shapes))
