"""The output head beside int8 linears, in each possible data type: CPU time, and perplexity.

    python benchmarks/output_head.py --model .cache/models/smollm2 --text docs/*.md

Times are of the head alone, [outputs, inputs] of the model, on one thread and by every instruction set that runs here;
the forms take turns. Perplexity is of the texts' first tokens in windows, keys and values in float32.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measured import say_kernels
from report import publish
from transformers import AutoConfig, AutoTokenizer

from mlflow_llm.serving.engine.assembly import assemble
from mlflow_llm.serving.engine.attention.kv_cache import PrefixKey, Row
from mlflow_llm.serving.engine.models.step_input import StepInput
from mlflow_llm.serving.engine.native import library
from mlflow_llm.serving.engine.native.weight import BF16, F32, INT8, ROTATED, NativeWeight
from mlflow_llm.serving.engine.weights import linear
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings

FORMS = {"float32": F32, "bfloat16": BF16, "int8": ROTATED, "int8, not rotated": INT8}


def times(outputs: int, inputs: int, rows: list[int], repeats: int) -> list[dict[str, Any]]:
    weight = torch.randn(outputs, inputs)
    found = []
    for instructions in library.INSTRUCTION_SETS:
        if library.why_not(instructions) is not None:
            continue
        library.use_instruction_set(instructions)
        library.use_threads(1)
        forms = {name: NativeWeight(weight, None, kind) for name, kind in FORMS.items()}
        for count in rows:
            x = torch.randn(count, inputs)
            each: dict[str, list[float]] = {name: [] for name in forms}
            for _ in range(repeats + 1):
                for name, packed in forms.items():
                    start = time.process_time()
                    packed.matmul(x)
                    each[name].append(time.process_time() - start)
            medians = {f"{name}, ms": statistics.median(spent[1:]) * 1e3 for name, spent in each.items()}
            found.append({"instructions": instructions, "rows": count, **medians})
    library.use_instruction_set("")
    return found


def perplexities(model: str, windows: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    bundle = Bundle(content_hash="bench", tasks=("completions",), model_dir=model, tokenizer_dir=model)
    settings = {"kv_cache_dtype": "float32", "packed_cache": 0}
    found = [{"weights": "float32", "perplexity": perplexity(bundle, EngineSettings(**settings), windows)}]  # type: ignore[arg-type]
    packs = linear._pack
    for linears in ("int8", "int8, not rotated"):
        for name, kind in FORMS.items():
            linear._pack = lambda weight, bias, _, is_head, kind=kind, linears=linears: NativeWeight(  # type: ignore[misc]
                weight, bias, kind if is_head else FORMS[linears]
            )
            settings_int8 = EngineSettings(quantization="int8", **settings)  # type: ignore[arg-type]
            found.append(
                {"weights": f"{linears}; head {name}", "perplexity": perplexity(bundle, settings_int8, windows)}
            )
    linear._pack = packs
    return found


def perplexity(bundle: Bundle, settings: EngineSettings, windows: np.ndarray[Any, Any]) -> float:
    parts = assemble(bundle, settings)
    length = windows.shape[1]
    losses = []
    for window in windows:
        parts.cache.acquire(0, PrefixKey("", ""), window.astype(np.int32))
        logits = parts.runner.step_forward.forward(StepInput(window, [Row(0, 0, length)], [None], range(length)))
        losses.append(-logits.log_softmax(-1)[:-1][range(length - 1), window[1:]].mean().item())
        parts.cache.release(0, keep=False)
    return math.exp(statistics.mean(losses))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/models/smollm2")
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=8)
    args = parser.parse_args()
    say_kernels()
    config = AutoConfig.from_pretrained(args.model)
    tokens = AutoTokenizer.from_pretrained(args.model)("\n\n".join(one.read_text() for one in args.text)).input_ids
    windows = np.array(tokens[: args.window * args.windows]).reshape(args.windows, args.window)
    found = perplexities(args.model, windows)
    publish("output_head_perplexity", found, window=args.window, windows=args.windows)
    publish("output_head", times(config.vocab_size, config.hidden_size, args.rows, args.repeats))


if __name__ == "__main__":
    main()
