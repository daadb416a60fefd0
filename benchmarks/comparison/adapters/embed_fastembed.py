"""fastembed over ONNX Runtime, the model as it was exported in float32."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType

from comparison.drive import versions
from comparison.embed import Embedder, in_order_of_length, serve


class FastEmbed(Embedder):
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        folder = options["model"]
        width = json.loads(Path(folder, "config.json").read_text())["hidden_size"]
        TextEmbedding.add_custom_model(
            "bench/model", pooling=PoolingType.MEAN, normalization=True, sources=ModelSource(hf="bench/model"),
            dim=width, model_file="model.onnx",
        )  # fmt: skip
        threads = len(os.sched_getaffinity(0))
        self._model = TextEmbedding("bench/model", specific_model_path=folder, threads=threads)
        self.versions = {**versions("fastembed", "onnxruntime"), "threads": str(threads)}

    def embed(self, texts: list[str]) -> Any:
        return in_order_of_length(texts, lambda some: np.array(list(self._model.embed(some, batch_size=32))))


if __name__ == "__main__":
    serve(FastEmbed)
