"""One decode forward of SmolLM2 with 0, 4, 8 and 16 adapters mixed in a batch, beside peft's mixed batch, in one run.

    python benchmarks/lora_batch.py MODEL_DIR [--quantization int8] [--uses]

Ranks 4, 8 and 16 in turn on every linear but the head; a row in each batch stays the base's. Ours is the engine's step
of one token a sequence. Neither side has earlier tokens to attend to: the ratios are of linears, LoRA and dispatch.

``--uses``: instead, the cost over the base of the first use of an evicted adapter of rank 16, which reads it from disk,
and of the second and third, which do not: whole requests of one token by the engine's core.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from measured import announced, say_kernels
from peft import LoraConfig, get_peft_model
from report import publish
from transformers import AutoModelForCausalLM

from mlflow_llm.serving.engine.assembly import assemble
from mlflow_llm.serving.engine.attention.kv_cache import PrefixKey, Row
from mlflow_llm.serving.engine.cores.generation_core import GenerationCore
from mlflow_llm.serving.engine.models.step_input import StepInput
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings

RANKS = (4, 8, 16)
COUNTS = (0, 4, 8, 16)
BATCHES = (8, 32)


def median_ms(run: Callable[[], Any], repeats: int) -> float:
    run(), run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def names_of(count: int, batch: int) -> list[str | None]:
    """Return adapter names by row: the first row is the base's, the others take the adapters in turn."""
    return [None] + [f"a{i % count}" if count else None for i in range(batch - 1)]


def run_peft(model_dir: str, folder: Path, repeats: int) -> dict[str, float]:
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model: Any = None
    for i in range(max(COUNTS)):
        config = LoraConfig(r=RANKS[i % 3], target_modules="all-linear", init_lora_weights=False)
        if model is None:
            model = get_peft_model(base, config, adapter_name="a0")
        else:
            model.add_adapter(f"a{i}", config)
    model.save_pretrained(folder)
    model.eval()
    found = {}
    for batch in BATCHES:
        ids = torch.randint(0, 1000, (batch, 1))
        for count in COUNTS:
            names = [name or "__base__" for name in names_of(count, batch)]
            found[f"{batch}/{count}"] = median_ms(lambda: model(input_ids=ids, adapter_names=names), repeats)  # noqa: B023
    return found


def run_ours(model_dir: str, folder: Path, repeats: int, settings: EngineSettings) -> dict[str, float]:
    bundle = Bundle(content_hash="bench", tasks=("completions",), model_dir=model_dir, tokenizer_dir=model_dir)
    parts = assemble(bundle, settings)
    for i in range(max(COUNTS)):
        parts.lora.add(f"a{i}", parts.lora.read(f"a{i}", str(folder / f"a{i}")))
    forward = parts.runner.step_forward
    found = {}
    for batch in BATCHES:
        ids = np.random.default_rng(0).integers(0, 1000, batch)
        for owner in range(batch):
            parts.cache.acquire(owner, PrefixKey("", ""), ids[owner : owner + 1].astype(np.int32))
        rows = [Row(owner, 0, 1) for owner in parts.cache.decode_order(range(batch))]
        for count in COUNTS:
            names = names_of(count, batch)
            step = StepInput(ids, rows, names, range(batch))
            found[f"{batch}/{count}"] = median_ms(partial(forward.forward, step), repeats)
        for owner in range(batch):
            parts.cache.release(owner, keep=False)
    return found


def run_uses(model_dir: str, folder: Path, repeats: int, settings: EngineSettings) -> list[dict[str, Any]]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    config = LoraConfig(r=max(RANKS), target_modules="all-linear", init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(folder / "one")
    del model
    paths = {"a": str(folder / "one"), "b": str(folder / "one")}
    bundle = Bundle(
        content_hash="bench", tasks=("completions",), model_dir=model_dir, tokenizer_dir=model_dir, adapters=paths
    )
    core = announced(GenerationCore(bundle, settings))
    core.unload_adapter("b")
    settings = msgspec.structs.replace(settings, adapter_memory=core._registry.num_bytes * 3 // 2)
    core.close()
    core = announced(GenerationCore(bundle, settings))  # with room for one of the two
    times: dict[str, list[tuple[float, float]]] = {"base": [], "first": [], "second": [], "third": [], "other": []}
    for i in range(repeats):
        for use, found in times.items():
            start, busy = time.perf_counter(), time.process_time()
            core.add(one_token(f"{use}{i}", {"base": None, "other": "b"}.get(use, "a")))
            while core.has_work():
                core.step()
            found.append((time.perf_counter() - start, time.process_time() - busy))
    core.close()
    medians = {use: [statistics.median(one) * 1e3 for one in zip(*found, strict=True)] for use, found in times.items()}
    base_ms, base_busy = medians["base"]
    return [
        {"use": use, "ms": ms, "ms over base": ms - base_ms, "processor ms": busy, "over base": busy - base_busy}
        for use, (ms, busy) in medians.items()
        if use != "other"
    ]


def one_token(request_id: str, adapter: str | None) -> ValidRequest:
    return ValidRequest(
        request_id=request_id,
        task="completions",
        model="bench",
        sequences=(Sequence(prompt_token_ids=(1,), seed=0),),
        sampling=Sampling(max_tokens=1, temperature=0.0),
        adapter=adapter,
        cache_salt="bench",
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir")
    parser.add_argument("--quantization", choices=("none", "int8"), default="none")
    parser.add_argument("--kernels", choices=("auto", "torch"), default="auto")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--uses", action="store_true")
    arguments = parser.parse_args()
    say_kernels(arguments.kernels)
    suffix = "" if arguments.quantization == "none" else f"-{arguments.quantization}"
    if arguments.uses:
        settings = EngineSettings(quantization=arguments.quantization, kernels=arguments.kernels, prefix_caching=False)
        with tempfile.TemporaryDirectory() as folder:
            rows = run_uses(arguments.model_dir, Path(folder), arguments.repeats, settings)
        publish(f"lora_uses{suffix}", rows, threads=torch.get_num_threads(), quantization=arguments.quantization)
        return
    with tempfile.TemporaryDirectory() as folder:
        theirs = run_peft(arguments.model_dir, Path(folder), arguments.repeats)
        settings = EngineSettings(quantization=arguments.quantization, kernels=arguments.kernels)
        ours = run_ours(arguments.model_dir, Path(folder), arguments.repeats, settings)
    rows = []
    for key, mine in ours.items():
        batch, count = key.split("/")
        rows.append({
            "batch": int(batch), "adapters": int(count), "ours ms": mine, "ours x of 0": mine / ours[f"{batch}/0"],
            "peft ms": theirs[key], "peft x of 0": theirs[key] / theirs[f"{batch}/0"],
        })  # fmt: skip
    publish(f"lora_batch{suffix}", rows, threads=torch.get_num_threads(), quantization=arguments.quantization)


if __name__ == "__main__":
    main()
