"""The cost of a grammar: the time of a step in which all sequences, or some of them, follow one, beside plain steps of
the same engine in the same run; and the saving by fast-forward.

Rounds of plain and constrained steps alternate in one process, on the thread that loaded the model. Each row decodes at
temperature 1 within an array of objects that never ends by itself, without fast-forward and speculation, so that a step
has the same rows with and without the grammar. `neighbours`: a quarter of the rows has the grammar, the others have
none.

    python benchmarks/structured.py --model .cache/models/smollm2
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

from measured import announced, say_kernels
from report import publish

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mail": {"type": "string", "pattern": "^[a-z]{3,12}@[a-z]{3,12}\\.(com|org)$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "mail", "tags"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": ITEM, "minItems": 10_000}
PLAIN, ALL, SOME = "plain", "grammar", "neighbours"


class Bench:
    """An engine, and the requests of the load."""

    def __init__(self, args: argparse.Namespace) -> None:
        from llguidance import LLMatcher
        from transformers import AutoTokenizer

        from mlflow_llm.serving.engine.core import EngineCore
        from mlflow_llm.serving.interface.bundle import Bundle
        from mlflow_llm.serving.interface.constraint import Grammar
        from mlflow_llm.serving.interface.settings import EngineSettings

        bundle = Bundle(content_hash="bench", tasks=("completions",), model_dir=args.model, tokenizer_dir=args.model)
        settings = EngineSettings(
            dtype=args.dtype,
            quantization=args.quantization,
            max_model_len=2048,
            prefix_caching=False,
            speculation="none",
        )
        self.core = announced(EngineCore(bundle, settings))
        self.tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
        self._numbers = itertools.count()
        self._sources = {
            name: LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
            for name, schema in {"endless": ENDLESS, "item": ITEM}.items()
        }
        self._grammar = Grammar

    def request(self, grammar: str | None, max_tokens: int, *, fast_forward: bool = False) -> Any:
        from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest

        number = next(self._numbers)
        ids = tuple(self.tokenizer.encode(f"{number} people, as JSON objects with name, age, mail and tags:\n"))
        held = None
        if grammar is not None:
            held = self._grammar(source=self._sources[grammar], field="grammar", fast_forward=fast_forward)
        return ValidRequest(
            request_id=f"r{number}",
            task="completions",
            model="m",
            sequences=(Sequence(prompt_token_ids=ids, seed=number),),
            sampling=Sampling(max_tokens=max_tokens, temperature=1.0, grammar=held),
        )

    def steps(self, requests: list[Any], count: int) -> list[float]:
        """Return the seconds of ``count`` steps in which all ``requests`` decode."""
        for request in requests:
            self.core.add(request, b"bench")
        while self.core.health().num_running < len(requests) or self._prefills(requests):
            self._step()
        found = []
        for _ in range(count):
            began = time.perf_counter()
            self.core.step()
            found.append(time.perf_counter() - began)
        for request in requests:
            self.core.abort(request.request_id)
        self.run()
        return found

    def _prefills(self, requests: list[Any]) -> bool:
        inflight = [self.core.inflight.get(request.request_id) for request in requests]
        return any(one.num_generated < 2 for request in inflight if request is not None for one in request.unfinished)

    def _step(self) -> list[Any]:
        if self.core.has_work():
            return self.core.step()
        time.sleep(0.0005)
        return []

    def run(self, *requests: Any) -> tuple[int, int]:
        """Run to the end and return (tokens, steps)."""
        for request in requests:
            self.core.add(request, b"bench")
        tokens, before = 0, self.core.health().steps
        while self.core.has_work() or self.core.waits:
            tokens += sum(len(getattr(event, "token_ids", ())) for *_, event in self._step())
        return tokens, self.core.health().steps - before


def measure(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for size in args.batch:
        kinds = [PLAIN, ALL] + ([SOME] if size >= 4 else [])
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(args.rounds):
            for kind in kinds:
                held = {PLAIN: 0, ALL: size, SOME: size // 4}[kind]
                requests = [bench.request("endless" if i < held else None, 1024) for i in range(size)]
                found[kind] += bench.steps(requests, args.steps)
        plain = statistics.median(found[PLAIN])
        for kind in kinds:
            step = statistics.median(found[kind])
            rows.append(
                {"rows": size, "steps": kind, "step ms": round(step * 1e3, 2), "x plain": round(step / plain, 3)}
            )
    return rows


def forwarded(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare whole objects with and without fast-forward: the same schema, as many tokens, fewer steps."""
    rows = []
    for size in args.batch:
        for on in (False, True):
            seconds, tokens, steps = [], 0, 0
            for _ in range(args.rounds):
                requests = [bench.request("item", 200, fast_forward=on) for _ in range(size)]
                began = time.perf_counter()
                some, few = bench.run(*requests)
                seconds.append(time.perf_counter() - began)
                tokens, steps = tokens + some, steps + few
            rate = size / statistics.median(seconds)
            name = "on" if on else "off"
            per = round(tokens / args.rounds / size, 1)
            rows.append(
                {"rows": size, "fast-forward": name, "objects/s": round(rate, 2), "tokens each": per, "steps": steps}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=".cache/models/smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=60, help="of each kind and round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    say_kernels()
    bench = Bench(args)
    bench.run(bench.request("endless", 4), bench.request("item", 4))
    publish("structured", measure(bench, args), load=f"{args.steps} steps a round, {args.rounds} rounds, medians")
    publish("structured_fast_forward", forwarded(bench, args), load=f"{args.rounds} rounds, medians")


if __name__ == "__main__":
    main()
