"""`mlflow models serve` with this flavor beside the same model logged with `mlflow.transformers`, in one run.

Greedy chat with a fixed number of new tokens, end of text ignored, closed loop. Time to first token is the latency
of a request for one token (neither server streams on this route).

    python benchmarks/models_serve.py --model .cache/models/smollm2
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from load import ModelsServe
from measured import say_kernels
from report import publish

from mlflow_llm.serving.cli.http import Client
from mlflow_llm.serving.cli.load_generator import Sample, closed_loop, percentile

TOPICS = ["rivers", "trains", "bread", "chess", "winter", "bridges", "maps", "clocks", "violins", "gardens", "salt"]


def question(number: int) -> str:
    """Return a question of about 100 tokens that differs from the first words on."""
    topic = TOPICS[number % len(TOPICS)]
    return (
        f"Question {number} about {topic}: write a long and careful text on how {topic} changed the lives of people "
        f"in small towns, what they cost, who looked after them, and what a visitor would have noticed first. "
        "Begin with the oldest records, then go on in order of time, and finish with the present day and what may come."
    )


def save_peer(model: str, path: Path, new: int) -> None:
    import mlflow
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.generation_config.update(min_new_tokens=1, do_sample=False, eos_token_id=None, pad_token_id=0)
    pipe = pipeline("text-generation", model=loaded, tokenizer=AutoTokenizer.from_pretrained(model))
    mlflow.transformers.save_model(pipe, str(path), task="llm/v1/chat", pip_requirements=[])


def save_ours(model: str, path: Path, quantization: str) -> None:
    import mlflow_llm.flavors.llm as flavor

    flavor.save_model(str(path), model=model, model_config={"quantization": quantization}, pip_requirements=[])


def one(client: Client, body: dict[str, Any]) -> Sample:
    """Send one request; the peer's reply is a list with wrong usage, so its tokens are the requested ones."""
    started = time.perf_counter()
    client.post("/invocations", body)
    return Sample(e2e=time.perf_counter() - started, prompt_tokens=0, tokens=body["max_tokens"])


def measure(
    name: str, path: Path, body: Callable[[int, int], dict[str, Any]], args: argparse.Namespace
) -> dict[str, Any]:
    with ModelsServe(path, log=path.parent / f"{path.name}.log") as server:
        ask = partial(one, Client(server.url, timeout=900))
        ask(body(1000, 4))
        row: dict[str, Any] = {"server": name, "ready after s": server.ready_after}
        first = closed_loop(ask, [body(2000 + i, 1) for i in range(5)], 1)
        row["TTFT p50 ms at 1"] = percentile(sorted(sample.e2e for sample in first.samples), 50) * 1000
        for callers in args.callers:
            bodies = [body(i, args.new) for i in range(callers * (args.rounds if callers == 1 else 1))]
            result = closed_loop(ask, bodies, callers)
            if result.errors:
                print(name, callers, len(result.errors), "errors, the first:", result.errors[0])
            row[f"{callers}: tokens/s"] = result.tokens_per_second
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=".cache/models/smollm2")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new", type=int, default=64, help="new tokens a request")
    parser.add_argument("--rounds", type=int, default=2, help="requests of the single caller")
    args = parser.parse_args()
    say_kernels()

    def ours(number: int, new: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": question(number)}]
        return {"messages": messages, "max_tokens": new, "temperature": 0, "ignore_eos": True}

    def peer(number: int, new: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question(number)}], "max_tokens": new}

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save_peer(args.model, root / "peer", args.new)
        save_ours(args.model, root / "ours", "none")
        save_ours(args.model, root / "int8", "int8")
        rows = [
            measure("mlflow.transformers", root / "peer", peer, args),
            measure("mlflow-llm float32", root / "ours", ours, args),
            measure("mlflow-llm int8", root / "int8", ours, args),
        ]
    for row in rows:
        for callers in args.callers:
            row[f"{callers}: × peer"] = row[f"{callers}: tokens/s"] / rows[0][f"{callers}: tokens/s"]
    publish("models_serve", rows, load=f"~100 prompt + {args.new} new tokens, greedy, closed loop")


if __name__ == "__main__":
    main()
