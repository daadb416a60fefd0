"""OpenVINO GenAI's text embedding pipeline."""

from __future__ import annotations

from typing import Any

import openvino_genai as genai

from comparison.drive import versions
from comparison.embed import Embedder, in_order_of_length, serve

BATCH = 32  # it runs its input as one batch, padded to its longest text


class OpenVino(Embedder):
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        config = genai.TextEmbeddingPipeline.Config()
        config.pooling_type = genai.TextEmbeddingPipeline.PoolingType.MEAN
        config.normalize = True
        self._pipeline = genai.TextEmbeddingPipeline(options["model"], "CPU", config)
        self.versions = versions("openvino-genai", "openvino")

    def embed(self, texts: list[str]) -> Any:
        return in_order_of_length(texts, self._embed)

    def _embed(self, texts: list[str]) -> Any:
        return [
            vector
            for first in range(0, len(texts), BATCH)
            for vector in self._pipeline.embed_documents(texts[first : first + BATCH])
        ]


if __name__ == "__main__":
    serve(OpenVino)
