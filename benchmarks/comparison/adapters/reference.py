"""transformers' `generate()` in float32, one prompt at a time, and its likelihood of others' texts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from comparison.drive import Engine, Piece, serve, versions


class Reference(Engine):
    """The reference engine; a request with ``tokens`` is scored: its text is their mean negative log probability."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._waiting: list[dict[str, Any]] = []
        self.versions = versions("transformers", "torch")

    def add(self, request: dict[str, Any]) -> None:
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self, wait: float) -> list[Piece]:
        request = self._waiting.pop(0)
        prompt = torch.tensor([request["prompt"]])
        if "tokens" in request:
            ids = torch.cat([prompt, torch.tensor([request["tokens"]])], 1)
            logits = self._model(ids).logits[0, prompt.shape[1] - 1 : -1]
            loss = torch.nn.functional.cross_entropy(logits, ids[0, prompt.shape[1] :])
            return [Piece(request["id"], [], str(float(loss)), True)]
        new = {"max_new_tokens": request["max_tokens"], "min_new_tokens": request["max_tokens"]}
        self._model.generation_config.eos_token_id = None
        out = self._model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0, **new
        )
        return [Piece(request["id"], out[0, prompt.shape[1] :].tolist(), "", True)]


if __name__ == "__main__":
    serve(Reference)
