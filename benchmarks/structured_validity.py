"""How often a text constrained by a schema violates it: generations at temperature 1, judged by `jsonschema` and
`jsonschema-rs`, each key seen once.

Schemas are those of the tests (`tests/serving/structured/random_schemas.py`), the prompt says nothing of them: what
keeps a text to its schema is the grammar alone. Texts run alone (`--batch 1`) or side by side, with plain neighbours.

    python benchmarks/structured_validity.py --model .cache/models/smollm2
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from measured import announced, say_kernels
from report import publish

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/serving/structured"))
PLAIN_EVERY = 8  # every such request is plain


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        from mlflow_llm.serving.engine.cores.generation_core import GenerationCore
        from mlflow_llm.serving.interface.bundle import Bundle
        from mlflow_llm.serving.interface.settings import EngineSettings

        bundle = Bundle(content_hash="bench", tasks=("completions",), model_dir=args.model, tokenizer_dir=args.model)
        settings = EngineSettings(quantization=args.quantization, max_model_len=2048, max_num_seqs=max(args.batch))
        self.core = announced(GenerationCore(bundle, settings))
        self.tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
        self.prompt = tuple(self.tokenizer.encode("Here is an example of the data, as JSON:\n"))
        self.max_tokens = args.max_tokens

    def request(self, name: str, grammar: Any, seed: int) -> Any:
        from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest

        return ValidRequest(
            request_id=name,
            task="completions",
            model="m",
            sequences=(Sequence(prompt_token_ids=self.prompt, seed=seed),),
            sampling=Sampling(max_tokens=self.max_tokens, temperature=1.0, grammar=grammar),
        )

    def texts(self, requests: Iterator[Any], batch: int) -> Iterator[tuple[str, str, str]]:
        """Yield ``(request, text, finish reason)``, with ``batch`` requests running at a time."""
        tokens: dict[str, list[int]] = {}
        while True:
            while len(tokens) < batch and (request := next(requests, None)) is not None:
                tokens[request.request_id] = []
                self.core.add(request, b"bench")
            if not tokens:
                return
            if not self.core.has_work():
                time.sleep(0.0005)
                continue
            for _, name, event in self.core.step():
                kind = type(event).__name__
                if kind == "Tokens":
                    tokens[name] += event.token_ids
                elif kind in ("Finished", "Failed"):
                    why = event.reason if kind == "Finished" else f"failed: {event.message}"
                    yield name, self.tokenizer.decode(tokens.pop(name), skip_special_tokens=True), str(why)


def held(count: int) -> dict[int, tuple[Any, Any]]:
    """Return schemas by seed, without those that are refused."""
    from random_schemas import random_schema

    from mlflow_llm.serving.interface.constraint import Constraint
    from mlflow_llm.serving.interface.errors import InvalidField
    from mlflow_llm.serving.structured.grammar import grammar_of

    found: dict[int, tuple[Any, Any]] = {}
    seed = 0
    while len(found) < count:
        schema = random_schema(seed)
        with suppress(InvalidField):
            found[seed] = schema, grammar_of(Constraint(kind="json_schema", value=schema, field="schema"))
        seed += 1
    return found


def is_valid(schema: Any, text: str) -> bool:
    import jsonschema
    import jsonschema_rs

    doubled = []

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        doubled.append(len(pairs) != len(dict(pairs)))
        return dict(pairs)

    value = json.loads(text, object_pairs_hook=distinct)
    judges = (jsonschema.Draft202012Validator(schema), jsonschema_rs.Draft202012Validator(schema))
    return all(judge.is_valid(value) for judge in judges) and not any(doubled)


def measure(bench: Bench, args: argparse.Namespace, batch: int) -> dict[str, Any]:
    schemas = held(args.schemas)

    def requests() -> Iterator[Any]:
        for number, (seed, (_, grammar)) in enumerate(list(schemas.items()) * args.seeds, start=args.first_seed):
            if batch > 1 and number % PLAIN_EVERY == 0:
                yield bench.request(f"plain {number}", None, number)
            yield bench.request(f"{seed} {number}", grammar, number)

    counts: Counter[str] = Counter()
    began = time.perf_counter()
    for name, text, why in bench.texts(requests(), batch):
        kind, _, _ = name.partition(" ")
        if kind == "plain":
            continue
        outcome = "cut by length" if why == "length" else "whole" if why == "stop" else why
        if outcome == "whole" and not is_valid(schemas[int(kind)][0], text):
            outcome = "broken"
            print(json.dumps(schemas[int(kind)][0]), text, sep="\n")
        counts[outcome] += 1
    row = {
        "side by side": batch,
        "texts": counts.total(),
        **{key: counts[key] for key in ("whole", "cut by length", "broken")},
    }
    row["failed"] = sum(count for key, count in counts.items() if key.startswith("failed"))
    return {**row, "seconds": round(time.perf_counter() - began)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=".cache/models/smollm2")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0, help="to go on where another run has ended")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--max-tokens", type=int, default=512)
    args = parser.parse_args()
    say_kernels()
    bench = Bench(args)
    rows = [measure(bench, args, batch) for batch in args.batch]
    publish("structured_validity", rows, load=f"{args.schemas} schemas x {args.seeds} seeds, temperature 1")


if __name__ == "__main__":
    main()
