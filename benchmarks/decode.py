"""Tokens per second of our engine beside `generate()` with a static padded batch, in one run on the same weights.

Each contender runs in a process of its own, on the thread that loaded the model; rounds are interleaved and the
median is reported, because these machines are noisy. The load: prompts of ~100 tokens, a fixed number of new tokens,
greedy, end of text ignored. With `--openvino DIR` (a model exported for OpenVINO GenAI) that runs beside them.

    python benchmarks/decode.py --model .cache/models/smollm2
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measured import announced, say_kernels
from report import publish

TEXT = "the river carries small boats past quiet towns where people read letters and plant trees in spring"
WORDS = TEXT.split(" ")


def prompt_ids(tokenizer: Any, number: int, length: int) -> list[int]:
    """Return a prompt of exactly ``length`` tokens that differs from the others from its first word on."""
    text = " ".join(WORDS[(number * 7 + i * (number % 5 + 1)) % len(WORDS)] for i in range(length + 8))
    return tokenizer.encode(f"{number} {text}", add_special_tokens=False)[:length]


def run_generate(args: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()

    @torch.inference_mode()
    def batch(size: int) -> int:
        ids = torch.tensor([prompt_ids(tokenizer, i, args.prompt) for i in range(size)])
        kwargs = {"max_new_tokens": args.new, "min_new_tokens": args.new, "do_sample": False}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **kwargs)
        return (out.shape[1] - ids.shape[1]) * size

    return batch


def run_ours(args: argparse.Namespace) -> Any:
    from transformers import AutoTokenizer

    from mlflow_llm.serving.engine.core import EngineCore
    from mlflow_llm.serving.interface.bundle import Bundle
    from mlflow_llm.serving.interface.events import Tokens
    from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
    from mlflow_llm.serving.interface.settings import EngineSettings

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    bundle = Bundle(content_hash="bench", tasks=("completions",), model_dir=args.model, tokenizer_dir=args.model)
    settings = EngineSettings(
        dtype=args.dtype, max_model_len=2048, prefix_caching=False, threads=args.threads, **OURS[args.contender]
    )
    core = announced(EngineCore(bundle, settings))

    def batch(size: int) -> int:
        for i in range(size):
            sequence = Sequence(prompt_token_ids=tuple(prompt_ids(tokenizer, i, args.prompt)))
            sampling = Sampling(max_tokens=args.new, temperature=0.0)
            core.add(
                ValidRequest(
                    request_id=f"r{time.monotonic_ns()}-{i}",
                    task="completions",
                    model="m",
                    sequences=(sequence,),
                    sampling=sampling,
                ),
                b"bench",
            )
        total = 0
        while core.has_work():
            total += sum(len(event.token_ids) for *_, event in core.step() if isinstance(event, Tokens))
        return total

    return batch


def run_openvino(args: argparse.Namespace) -> Any:
    import openvino_genai as ov
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    scheduler = ov.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = False
    pipe = ov.ContinuousBatchingPipeline(args.openvino, scheduler, "CPU")

    def batch(size: int) -> int:
        config = ov.GenerationConfig(max_new_tokens=args.new, ignore_eos=True, do_sample=False)
        texts = [tokenizer.decode(prompt_ids(tokenizer, i, args.prompt)) for i in range(size)]
        return sum(
            len(tokenizer.encode(t)) and args.new
            for r in pipe.generate(texts, [config] * size)
            for t in r.m_generation_ids
        )

    return batch


OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours int8": {"quantization": "int8"},
    "ours int8, KV int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}
CONTENDERS = {"generate": run_generate, **dict.fromkeys(OURS, run_ours), "openvino int8": run_openvino}


def contend(args: argparse.Namespace) -> None:
    """Run one contender's process: warm up, then time each batch size once; JSON on the last line."""
    batch = CONTENDERS[args.contender](args)
    batch(2)
    found = {}
    for size in args.batch:
        start = time.perf_counter()
        tokens = batch(size)
        found[size] = tokens / (time.perf_counter() - start)
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=".cache/models/smollm2")
    parser.add_argument("--openvino", help="directory of an OpenVINO int8 export of the same model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=100, help="prompt tokens")
    parser.add_argument("--new", type=int, default=128, help="new tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--contender", choices=CONTENDERS)
    args = parser.parse_args()
    if args.contender:
        contend(args)
        return
    say_kernels()
    names = ["generate", *OURS] + (["openvino int8"] if args.openvino else [])
    found: dict[str, dict[int, list[float]]] = {name: {size: [] for size in args.batch} for name in names}
    for _ in range(args.rounds):
        for name in names:
            command = [sys.executable, __file__, *sys.argv[1:], "--contender", name]
            done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path.cwd())
            for size, rate in json.loads(done.stdout.splitlines()[-1]).items():
                found[name][int(size)].append(rate)
    rows: list[dict[str, Any]] = []
    for name in names:
        row: dict[str, Any] = {"engine": name}
        for size in args.batch:
            rate = statistics.median(found[name][size])
            row[f"{size}: tokens/s"] = rate
            row[f"{size}: × generate"] = rate / statistics.median(found["generate"][size])
        rows.append(row)
    publish("decode", rows, load=f"{args.prompt} prompt + {args.new} new tokens, greedy, {args.rounds} rounds, medians")


if __name__ == "__main__":
    main()
