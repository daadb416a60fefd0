"""Speed and accuracy of bfloat16 or int8 beside float32: for keys and values alone, or for the whole model in bfloat16
(--dtype bfloat16); or of four-bit weights beside int8 (--int4). Prompts, decodes, and the difference of texts.

    python benchmarks/bfloat16.py --model .cache/models/smollm2 [--quantization int8] [--dtype bfloat16]
    python benchmarks/bfloat16.py --model .cache/models/smollm2 --kv-cache-dtype int8 [--quantization int8]
    python benchmarks/bfloat16.py --model .cache/models/smollm2 --int4 LOGGED/model

Both engines are in one process and take turns, prompt by prompt; times are medians (--rounds 0: none are taken). Texts
that are scored are the project's own documents; perplexity is that of each token given up to `--window` before it.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

from measured import announced, say_kernels
from report import publish

from mlflow_llm.serving.engine.cores.generation_core import GenerationCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings

DOCUMENTS = Path(__file__).parent.parent / "docs"


def request(name: str, ids: tuple[int, ...], **sampling: Any) -> ValidRequest:
    return ValidRequest(
        request_id=name,
        task="completions",
        model="m",
        sequences=(Sequence(prompt_token_ids=ids),),
        sampling=Sampling(**{"temperature": 0.0, **sampling}),
    )


def seconds_to_first(core: GenerationCore, ids: tuple[int, ...]) -> float:
    core.add(request("prompt", ids, max_tokens=1))
    began = time.perf_counter()
    while core.has_work():
        core.step()
    return time.perf_counter() - began


def seconds_a_step(core: GenerationCore, size: int, length: int) -> float:
    """Return the median time of a step once ``size`` sequences of ``length`` tokens decode."""
    new = 24
    for i in range(size):
        core.add(request(str(i), drawn(length, i), max_tokens=new))
    times = []
    while core.has_work():
        began = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[-new + 2 : -2])


def drawn(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(100, 20000), k=length))


def surprise(core: GenerationCore, windows: list[tuple[int, ...]]) -> tuple[float, int]:
    """Return the summed negative log probabilities of the windows' tokens, and their number."""
    total, count = 0.0, 0
    for ids in windows:
        core.add(request("scored", ids, max_tokens=0, logprobs=0, prompt_logprobs=0))
        while core.has_work():
            for _, _, event in core.step():
                if type(event).__name__ == "PromptScored":
                    total -= sum(entry.logprob for entry in event.logprobs)
                    count += len(event.logprobs)
    return total, count


def texts(core: GenerationCore, prompts: list[tuple[int, ...]], new: int) -> list[list[int]]:
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, ids in enumerate(prompts):
        core.add(request(str(i), ids, max_tokens=new))
    while core.has_work():
        for _, name, event in core.step():
            if type(event).__name__ == "Tokens":
                found[name] += event.token_ids
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/models/smollm2")
    parser.add_argument("--quantization", choices=("none", "int8"), default="none")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--kv-cache-dtype", choices=("bfloat16", "int8"), default="bfloat16")
    parser.add_argument("--int4", help="the files of --model as it was logged with quantize='int4'")
    parser.add_argument("--prompts", type=int, nargs="+", default=[100, 1000, 4000])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--length", type=int, default=165, help="of the sequences that decode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=24)
    args = parser.parse_args()
    say_kernels()
    if args.int4 and (args.quantization, args.dtype, args.kv_cache_dtype) != ("none", "float32", "bfloat16"):
        parser.error("--int4 stands beside int8, and takes no --quantization, --dtype or --kv-cache-dtype")
    from transformers import AutoTokenizer

    settings: dict[str, Any] = {
        "max_model_len": 8192,
        "prefix_caching": False,
        "speculation": "none",
        "kv_cache_memory": 2 << 30,
    }
    narrow = args.kv_cache_dtype
    each: dict[str, dict[str, Any]] = {
        "float32": {"kv_cache_dtype": "float32", "quantization": args.quantization},
        narrow: {"kv_cache_dtype": narrow, "dtype": args.dtype, "quantization": args.quantization},
    }
    if args.int4:
        narrow = "int4"
        each = {"int8": {"quantization": "int8"}, narrow: {"quantization": "int4"}}
    whole, kinds = next(iter(each)), tuple(each)
    folders = {"int4": args.int4}
    cores = {
        kind: announced(
            GenerationCore(
                Bundle(
                    content_hash="bench",
                    tasks=("completions",),
                    model_dir=folders.get(kind, args.model),
                    tokenizer_dir="",
                ),
                EngineSettings(**settings, **more),
            )
        )
        for kind, more in each.items()
    }
    rows: list[dict[str, Any]] = []

    def compared(what: str, measure: Any) -> None:
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(args.rounds + 1):
            for kind in kinds[:: 1 if turn % 2 else -1]:
                found = measure(cores[kind], turn)
                if turn:
                    times[kind].append(found)
        ms = [1e3 * statistics.median(times[kind]) for kind in kinds]
        ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
        rows.append({"what": what, whole: ms[0], narrow: ms[1], "times as fast": ratio})

    for length in args.prompts if args.rounds else ():
        compared(f"prompt of {length}, ms", lambda core, turn, n=length: seconds_to_first(core, drawn(n, turn)))
    for size in args.batch if args.rounds else ():
        compared(f"step of {size}, ms", lambda core, _, n=size: seconds_a_step(core, n, args.length))

    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    words = "\n".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.md")))
    ids = tokenizer.encode(words)
    windows = [tuple(ids[i : i + args.window]) for i in range(0, args.window * args.windows, args.window)]
    perplexity = {}
    for kind in kinds:
        total, count = surprise(cores[kind], windows)
        perplexity[kind] = math.exp(total / count)
    rows.append({"what": f"perplexity of {count} tokens", **perplexity})
    prompts = [tuple(ids[i * 911 : i * 911 + 64]) for i in range(32)]
    found = {kind: texts(cores[kind], prompts, 64) for kind in kinds}
    same = [a == b for a, b in zip(*found.values(), strict=True)]
    rows.append({"what": "greedy texts of 64 tokens that are the same", narrow: f"{sum(same)} of {len(same)}"})
    said = {} if args.int4 else {"quantization": args.quantization, "dtype": args.dtype}
    publish(f"kv-{narrow}" if narrow == "int8" else narrow, rows, rounds=args.rounds, **said)


if __name__ == "__main__":
    main()
