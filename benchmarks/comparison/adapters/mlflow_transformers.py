"""`mlflow models serve` of the model logged with `mlflow.transformers`. Its route does not stream."""

from __future__ import annotations

import json
import queue
import threading
import urllib.request
from pathlib import Path
from typing import Any

import torch
from load import ModelsServe
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from comparison.drive import Engine, Piece, serve, versions


def saved(model: str, store: Path) -> Path:
    """Save the model in MLflow's form, greedy and without an end of text, completely or not at all."""
    import mlflow

    path = store / "mlflow-transformers"
    if not path.is_dir():
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        loaded.generation_config.update(do_sample=False, eos_token_id=None, pad_token_id=0)
        pipe = pipeline("text-generation", model=loaded, tokenizer=AutoTokenizer.from_pretrained(model))
        unfinished = store / ".mlflow-transformers"
        mlflow.transformers.save_model(pipe, str(unfinished), task="llm/v1/completions", pip_requirements=[])
        unfinished.rename(path)
    return path


class Served(Engine):
    servers = True

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._server = ModelsServe(saved(model, Path(options["store"])))
        self._server.__enter__()
        self._answers: queue.Queue[Piece | Exception] = queue.Queue()
        self.versions = versions("mlflow", "transformers", "torch")

    def add(self, request: dict[str, Any]) -> None:
        threading.Thread(target=self._ask, args=(request,), daemon=True).start()

    def _ask(self, request: dict[str, Any]) -> None:
        body = {"prompt": request["text"], "max_tokens": request["max_tokens"]}
        try:
            asked = urllib.request.Request(
                f"{self._server.url}/invocations", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=900) as answer:
                said = json.load(answer)
            text = (said[0] if isinstance(said, list) else said)["choices"][0]["text"]
            # Its usage is wrong; without an end of text the number of tokens is the requested one.
            self._answers.put(Piece(request["id"], [], text, True, request["max_tokens"]))
        except Exception as error:
            self._answers.put(error)

    def close(self) -> None:
        self._server.__exit__()

    def step(self, wait: float) -> list[Piece]:
        try:
            answer = self._answers.get(timeout=wait)
        except queue.Empty:
            return []
        if isinstance(answer, Exception):
            raise answer
        return [answer]


if __name__ == "__main__":
    serve(Served)
