"""Many sequences over one long prompt: time and memory to start each, and the time of a step of all of them, with the
prompt's keys and values read in place and with a copy for each. Then, through the engine's loop, the time to
the first token of a request whose prompt is found again but for its end, beside that of one that nobody sent before.

    python benchmarks/shared_prefix.py --model .cache/models/smollm2 --sequences 32 --prompt 4000
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from measured import announced, say_kernels

from mlflow_llm.serving.engine.attention.kv_cache import PrefixKey, Row
from mlflow_llm.serving.engine.attention.slot_cache import BF16_LAYOUT, INT8_LAYOUT, SlotKVCache
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.models.loader import load_model
from mlflow_llm.serving.engine.models.native_decoder import NativeDecoder
from mlflow_llm.serving.engine.models.step_input import StepInput
from mlflow_llm.serving.engine.native import library
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.events import Finished, Tokens
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings

CHUNK = 512  # tokens of the prompt in a step
OWN = 64  # tokens that each sequence has after the prompt
END = 20  # tokens in which a request differs from the one before, through the loop
PAIRS = 5
KEY = PrefixKey("", "")


def measure(loaded: Any, kept: Any, args: argparse.Namespace, *, by_reference: bool) -> str:
    """Return a row of the table."""
    count, length = args.sequences, args.prompt
    size = length + OWN
    cache = SlotKVCache(
        loaded.layers, num_slots=count, num_tokens=count * size, max_model_len=size, by_reference=by_reference, **kept
    )
    decoder = NativeDecoder(loaded.decoder, cache)
    draw = np.random.default_rng(0)
    tokens = draw.integers(10, loaded.vocab_size, (count, size)).astype(np.int32)
    tokens[:, :length] = tokens[0, :length]
    cache.acquire(0, KEY, tokens[0])
    began = time.perf_counter()
    for start in range(0, length, CHUNK):
        ids = tokens[0, start : min(start + CHUNK, length)].astype(np.int64)
        decoder.forward(StepInput(ids, [Row(0, start, len(ids))], [None], [len(ids) - 1]))
    miss = time.perf_counter() - began
    cache.computed(0, tokens[0], length)
    memory, hits = psutil.Process().memory_info().rss, []
    for owner in range(1, count):
        began = time.perf_counter()
        assert cache.acquire(owner, KEY, tokens[owner]) == length
        hits.append(time.perf_counter() - began)
    memory = psutil.Process().memory_info().rss - memory
    steps = []
    for place in range(length, size):
        rows = [Row(owner, place, 1) for owner in range(count)]
        began = time.perf_counter()
        decoder.forward(StepInput(tokens[:, place].astype(np.int64), rows, [None] * count, range(count)))
        steps.append(time.perf_counter() - began)
    cache.close()
    each = memory / len(hits) / 2**20
    hit = 1000 * statistics.median(hits)
    return f"{1000 * miss:.0f} | {hit:.1f} | {each:.1f} | {1000 * statistics.median(steps):.0f}"


def seconds_to_first(core: EngineCore, name: str, prompt: list[int]) -> float:
    request = ValidRequest(
        request_id=name,
        task="completions",
        model="bench",
        sequences=(Sequence(prompt_token_ids=tuple(prompt)),),
        sampling=Sampling(max_tokens=2, min_tokens=2, temperature=0.0),
        stream=True,
        cache_salt="bench",
    )
    began, first = time.perf_counter(), 0.0
    core.add(request, b"bench")
    while True:
        for _, _, event in core.step():
            if isinstance(event, Tokens) and not first:
                first = time.perf_counter() - began
            elif isinstance(event, Finished):
                return first


def hits(bundle: Bundle, args: argparse.Namespace) -> str:
    """Return medians of some pairs: a prompt of the length and END more, and the same with another end."""
    common: dict[str, Any] = {"packed_cache": 0, "speculation": "none", "kv_cache_memory": 2 << 30}
    core = announced(EngineCore(bundle, EngineSettings(quantization=args.quantization, **common)))
    draw = np.random.default_rng(1)
    misses, found = [], []
    for i in range(PAIRS):
        tokens = draw.integers(10, core.info.vocab_size, args.prompt + END).tolist()
        misses.append(seconds_to_first(core, f"miss {i}", tokens))
        found.append(seconds_to_first(core, f"hit {i}", tokens[: args.prompt] + tokens[: args.prompt - 1 : -1]))
    share = statistics.median(hit / miss for hit, miss in zip(found, misses, strict=True))
    miss, hit = (1000 * statistics.median(times) for times in (misses, found))
    return f"first token of {args.prompt} + {END} tokens: {miss:.0f} ms, found again {hit:.1f} ms, {share:.3f} of it"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens that all sequences begin with")
    parser.add_argument("--quantization", choices=("none", "int8"), default="int8")
    args = parser.parse_args()
    say_kernels()
    bundle = Bundle(
        content_hash="benchmark", tasks=("completions",), model_dir=str(args.model), tokenizer_dir=str(args.model)
    )
    settings = EngineSettings(quantization=args.quantization, max_model_len=args.prompt + OWN)
    loaded = load_model(bundle, settings)
    if loaded.decoder is None:
        raise SystemExit(f"the model is not run natively: {loaded.kernels_reason}")
    forms: dict[str, Any] = {"float32": {"dtype": torch.float32}, "int8": INT8_LAYOUT}
    if library.why_no_bf16_kv(loaded.decoder.head_dim) is None:
        forms["bfloat16"] = BF16_LAYOUT
    print(f"{library.instruction_set()}, {args.sequences} sequences over {args.prompt} tokens\n")
    print("| KV | prefix | the prompt computed, ms | found again, ms | memory of each more, MiB | step of all, ms |")
    print("|---|---|---|---|---|---|")
    for name, kept in forms.items():
        for by_reference in (False, True):
            row = measure(loaded, kept, args, by_reference=by_reference)
            print(f"| {name} | {'read in place' if by_reference else 'copied'} | {row} |", flush=True)
    print(f"\n{hits(bundle, args)}")


if __name__ == "__main__":
    main()
