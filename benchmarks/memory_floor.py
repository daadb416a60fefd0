"""A step of one sequence beside the time that reading its weights, keys and values from memory takes, by turns.

    python benchmarks/memory_floor.py --model .cache/models/smollm2 [--quantization int8] [--kv-cache-dtype auto]

How fast memory is read: the sum of a gigabyte of floats by as many threads as the engine has.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from measured import announced, say_kernels
from report import publish

from mlflow_llm.serving.engine.cores.generation_core import GenerationCore
from mlflow_llm.serving.engine.models.native_decoder import NativeDecoder
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.events import Finished
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings


def seconds_a_step(core: GenerationCore, name: str, prompt: int, new: int) -> float:
    request = ValidRequest(
        request_id=name,
        task="completions",
        model="bench",
        sequences=(Sequence(prompt_token_ids=tuple(range(100, 100 + prompt))),),
        sampling=Sampling(max_tokens=new, min_tokens=new, temperature=0.0),
        cache_salt=name,
    )
    core.add(request, b"bench")
    steps = []
    over = False
    while not over:
        start = time.perf_counter()
        over = any(isinstance(event, Finished) for _, _, event in core.step())
        steps.append(time.perf_counter() - start)
    return statistics.median(steps[-(new - 1) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/models/smollm2")
    parser.add_argument("--quantization", choices=("none", "int8"), default="int8")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    say_kernels()
    bundle = Bundle(content_hash="bench", tasks=("completions",), model_dir=args.model, tokenizer_dir=args.model)
    core = announced(
        GenerationCore(
            bundle,
            EngineSettings(
                quantization=args.quantization,
                kv_cache_dtype=args.kv_cache_dtype,
                kv_cache_memory=1 << 30,
                packed_cache=0,
                speculation="none",
            ),
        )
    )
    decoder = core.parts.runner.step_forward
    assert isinstance(decoder, NativeDecoder)
    weights = decoder.weights
    packed = {
        id(one): one for layer in weights.layers for one in (layer.qkv, layer.o, layer.gate_up, layer.down) if one
    }
    packed[id(weights.head)] = weights.head
    read = sum(part.nbytes for one in packed.values() for part in one.parts().values())
    cache = core.parts.cache
    read += (args.prompt + args.new // 2) * core.info.kv_cache_memory // cache.num_tokens_total
    numbers = torch.ones(1 << 28)
    floors, steps = [], []
    for turn in range(args.rounds + 1):
        start = time.perf_counter()
        numbers.sum()
        floors.append((time.perf_counter() - start) / (numbers.numel() * 4) * read)
        steps.append(seconds_a_step(core, f"r{turn}", args.prompt, args.new))
    shares = [floor / step for floor, step in zip(floors[1:], steps[1:], strict=True)]
    row = {
        "reads, MB": read / 1e6, "GB/s": read / statistics.median(floors[1:]) / 1e9,
        "floor, ms": statistics.median(floors[1:]) * 1e3, "step, ms": statistics.median(steps[1:]) * 1e3,
        "floor / step": statistics.median(shares), "from": min(shares), "to": max(shares),
    }  # fmt: skip
    publish("memory_floor", [row], instruction_set=core.info.instruction_set, kv_cache_dtype=core.info.kv_cache_dtype)
    core.close()


if __name__ == "__main__":
    main()
