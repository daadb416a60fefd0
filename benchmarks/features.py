"""The cost of request features: the engine's step with them, beside a step of as many plain greedy sequences.

    python benchmarks/features.py --model .cache/models/smollm2 [--quantization int8]
    python benchmarks/features.py --kernels torch --quantization none --only plain --batch-invariant

Bursts of the features and of the plain path take turns in one process; a burst's figure is the median of its steps once
all sequences decode, and what is reported are medians of the ratios within a round. A search of four beams stands
beside four plain sequences.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import msgspec
from measured import announced, say_kernels
from report import publish

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.request import Beams, Sampling, Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings

WIDTH = 4
INVARIANT = "batch_invariant"  # a setting of the engine
DRAWN = {"temperature": 1.0}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": DRAWN,
    "top_p 0.9": DRAWN | {"top_p": 0.9},
    "top_k 50": DRAWN | {"top_k": 50},
    "typical_p 0.9": DRAWN | {"typical_p": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence and frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit_bias of 100": {"logit_bias": tuple((token, 1.0) for token in range(1000, 1100))},
    "logprobs 5": {"logprobs": 5},
    "generation logits": {"generation_logits": True},
    "bad_words, 10 of two tokens": {"bad_words": tuple((1000 + i, 2000 + i) for i in range(10))},
    "stop_sequences, 4 of two tokens": {"stop_sequences": tuple((1000 + i, 2000 + i) for i in range(4))},
    "no_repeat_ngram_size 3": {"no_repeat_ngram_size": 3},
    "embedding_bias": {"embedding_bias": True},  # of the model's own vocabulary: see ``burst``
    "penalties that count the prompt": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "penalize_prompt": True},
    f"beams, {WIDTH}": {"beams": Beams(width=WIDTH, early_stopping="never")},
    f"beams, {WIDTH} in 2 groups": {"beams": Beams(width=WIDTH, num_groups=2, diversity_penalty=0.5)},
}


def burst(core: EngineCore, size: int, new: int, number: int, fields: dict[str, Any]) -> float:
    """Return the median milliseconds of a step, once all of ``size`` sequences decode."""
    width = fields["beams"].width if "beams" in fields else 1
    if "embedding_bias" in fields:
        fields = fields | {"embedding_bias": b"\0\0\0\0" * core.info.vocab_size}
    for i in range(size // width):
        ids = tuple((number * 7919 + i * 104729 + place * 31) % core.info.vocab_size for place in range(16))
        sampling = Sampling(**{"max_tokens": new, "temperature": 0.0} | fields)
        request = ValidRequest(
            request_id=f"{number}-{i}", task="completions", model="m", sampling=sampling,
            sequences=(Sequence(prompt_token_ids=ids, seed=i),), cache_salt="bench",
        )  # fmt: skip
        core.add(request)
    times = []
    while core.has_work():
        began = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[len(times) // 4 : -2]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/models/smollm2")
    parser.add_argument("--quantization", choices=("none", "int8"), default="int8")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", choices=("auto", "torch"), default="auto")
    parser.add_argument("--batch-invariant", action="store_true", help="beside the plain step without the setting")
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 8, 32])
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=list(FEATURES), default=list(FEATURES))
    args = parser.parse_args()
    say_kernels(args.kernels)
    bundle = Bundle(content_hash="bench", tasks=("completions",), model_dir=args.model, tokenizer_dir="")
    settings = EngineSettings(
        max_logits_bytes=2**30,
        quantization=args.quantization,
        dtype=args.dtype,
        kernels=args.kernels,
        max_model_len=512,
        prefix_caching=False,
    )
    core = announced(EngineCore(bundle, settings))
    invariant = None
    names = ["plain", *(name for name in args.only if name != "plain")]
    if args.batch_invariant:
        invariant = announced(EngineCore(bundle, msgspec.structs.replace(settings, batch_invariant=True)))
        names.append(INVARIANT)
    ratios: dict[tuple[int, str], list[float]] = {}
    plain_ms: dict[int, list[float]] = {}
    rng, number = random.Random(0), 0
    for turn in range(args.rounds + 1):
        for size in args.batch:
            found = {}
            for name in rng.sample(names, len(names)):
                number += 1
                runs_in = invariant if invariant is not None and name == INVARIANT else core
                found[name] = burst(runs_in, size, args.new, number, FEATURES.get(name, {}))
            if turn:  # the first round warms up
                plain_ms.setdefault(size, []).append(found["plain"])
                for name in names[1:]:
                    ratios.setdefault((size, name), []).append(found[name] / found["plain"])
    for one in (core, invariant):
        if one is not None:
            one.close()
    rows = [{"feature": "plain, ms"} | {str(size): statistics.median(plain_ms[size]) for size in args.batch}]
    for name in names[1:]:
        rows.append({"feature": name} | {str(size): statistics.median(ratios[size, name]) for size in args.batch})
    publish(f"features-{args.quantization}", rows, rounds=args.rounds, new_tokens=args.new)


if __name__ == "__main__":
    main()
