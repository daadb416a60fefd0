"""Our embedder on this process's main thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from comparison.drive import versions
from comparison.embed import Embedder, serve
from mlflow_llm.serving.engine.models.embedder import load_embedder
from mlflow_llm.serving.engine.models.sentence_files import read_spec
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings


class Ours(Embedder):
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        bundle = Bundle(
            content_hash="", tasks=("embeddings",), model_dir=model, tokenizer_dir=model, embedding=read_spec(model)
        )
        self._embedder = load_embedder(bundle, EngineSettings(packed_cache=0, **options))
        self._tokenizer = Tokenizer.from_file(str(Path(model, "tokenizer.json")))
        self._tokenizer.enable_truncation(self._embedder.max_length)
        self._tokenizer.no_padding()
        self.versions = {**versions("mlflow-llm", "torch"), "threads": str(torch.get_num_threads())}

    def embed(self, texts: list[str]) -> Any:
        return self._embedder.embed(
            [one.ids for one in self._tokenizer.encode_batch_fast(texts)]
        )  # as tasks/prompt/text.py does


if __name__ == "__main__":
    serve(Ours)
