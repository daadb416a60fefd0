"""OpenVINO GenAI's continuous batching, in process."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino_genai as genai
from openvino import Tensor

from comparison.drive import Engine, Piece, serve, versions


class OpenVino(Engine):
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.enable_prefix_caching = True
        self._pipeline = genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU")
        self._handles: dict[str, Any] = {}
        self._left: dict[str, int] = {}
        self._count = 0
        self.versions = versions("openvino-genai", "openvino")

    def add(self, request: dict[str, Any]) -> None:
        config = genai.GenerationConfig(max_new_tokens=request["max_tokens"], ignore_eos=True, do_sample=False)
        ids = Tensor(np.array([request["prompt"]], dtype=np.int64))
        self._count += 1
        self._handles[request["id"]] = self._pipeline.add_request(self._count, ids, config)
        self._left[request["id"]] = request["max_tokens"]

    def step(self, wait: float) -> list[Piece]:
        self._pipeline.step()
        pieces = []
        for name, handle in list(self._handles.items()):
            if not handle.can_read():
                continue
            (output,) = handle.read().values()
            tokens = list(output.generated_ids)
            self._left[name] -= len(tokens)
            over = self._left[name] <= 0
            if over:
                del self._handles[name], self._left[name]
            pieces.append(Piece(name, tokens, "", over))
        return pieces


if __name__ == "__main__":
    serve(OpenVino)
