"""sentence-transformers, in float32 or bfloat16 by torch."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from comparison.drive import versions
from comparison.embed import Embedder, serve


class Theirs(Embedder):
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        dtype = getattr(torch, options["dtype"])
        self._model = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": dtype})
        self.versions = {**versions("sentence-transformers", "torch"), "threads": str(torch.get_num_threads())}

    def embed(self, texts: list[str]) -> Any:
        return self._model.encode(texts, show_progress_bar=False)


if __name__ == "__main__":
    serve(Theirs)
