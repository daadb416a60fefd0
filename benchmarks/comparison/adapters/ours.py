"""Our engine on this process's main thread."""

from __future__ import annotations

from typing import Any

from comparison.drive import Engine, Piece, serve, versions
from comparison.kernels import require_native
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.events import Failed, Finished, Tokens
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings


class Ours(Engine):
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        bundle = Bundle(content_hash="compare", tasks=("completions",), model_dir=model, tokenizer_dir=model)
        common: dict[str, Any] = {"kv_cache_memory": 2 << 30, "packed_cache": 0, "speculation": "none"}
        self._core = EngineCore(bundle, EngineSettings(**(common | options)))
        info = self._core.info
        require_native(info.kernels, info.kernels_reason)
        self.versions = {**versions("mlflow-llm", "torch"), "kernels": info.kernels, "kv_cache": info.kv_cache_dtype}

    def add(self, request: dict[str, Any]) -> None:
        valid = ValidRequest(
            request_id=request["id"],
            task="completions",
            model="m",
            sequences=(Sequence(prompt_token_ids=tuple(request["prompt"])),),
            sampling=Sampling(max_tokens=request["max_tokens"], temperature=0.0),
            stream=True,  # otherwise tokens come a few at a time, the first one included
            cache_salt="compare",  # prefixes are shared, as they are over HTTP
        )
        self._core.add(valid, b"compare")

    def step(self, wait: float) -> list[Piece]:
        pieces = []
        for _, request, event in self._core.step():
            if isinstance(event, Tokens):
                pieces.append(Piece(request, list(event.token_ids), "", False))
            elif isinstance(event, Finished):
                pieces.append(Piece(request, [], "", True))
            elif isinstance(event, Failed):
                raise RuntimeError(f"{event}")
        return pieces


if __name__ == "__main__":
    serve(Ours)
