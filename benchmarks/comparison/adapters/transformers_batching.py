"""transformers' continuous batching, in process."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from comparison.drive import Engine, Piece, serve, versions


class ContinuousBatching(Engine):
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
        config = ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=512)
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = loaded.init_continuous_batching(generation, config)
        self._manager.start()
        self._given: dict[str, int] = {}
        self.versions = versions("transformers", "torch")

    def add(self, request: dict[str, Any]) -> None:
        self._given[request["id"]] = 0
        self._manager.add_request(
            request["prompt"],
            request_id=request["id"],
            max_new_tokens=request["max_tokens"],
            streaming=True,
            eos_token_id=-1,
        )

    def step(self, wait: float) -> list[Piece]:
        """Return the new tokens of results, which hold all tokens so far."""
        pieces: list[Piece] = []
        while result := self._manager.get_result(timeout=0.0 if pieces else wait):
            if result.error:
                raise RuntimeError(result.error)
            tokens = result.generated_tokens[self._given[result.request_id] :]
            self._given[result.request_id] += len(tokens)
            pieces.append(Piece(result.request_id, list(tokens), "", result.is_finished()))
        if not pieces and not self._manager.is_running():
            raise RuntimeError("its loop has ended")
        return pieces


if __name__ == "__main__":
    serve(ContinuousBatching)
