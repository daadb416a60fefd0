"""The accuracy of weights in fp8: perplexity of a text beside floats and int8, computed on CPU by torch's references.

    python benchmarks/fp8.py --model .cache/models/smollm2 --text docs/*.md

``few rows``: activations of every token as they are, as decode steps of few sequences have them; ``many rows``: in fp8
by token, as prompts have them. Speed is for ``gpu.py`` to measure.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measured import say_kernels
from output_head import perplexity
from report import publish
from transformers import AutoTokenizer

from mlflow_llm.serving.engine.weights.fp8 import Fp8Weight
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings

FORMS: dict[str, tuple[str, int]] = {  # quantization, and up to how many rows use the product for few
    "floats": ("none", 0),
    "int8": ("int8", 0),
    "fp8, few rows": ("fp8", 1 << 30),
    "fp8, many rows": ("fp8", 0),
}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/models/smollm2")
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=8)
    args = parser.parse_args()
    say_kernels("torch")
    tokens = AutoTokenizer.from_pretrained(args.model)("\n\n".join(one.read_text() for one in args.text)).input_ids
    windows = np.array(tokens[: args.window * args.windows]).reshape(args.windows, args.window)
    bundle = Bundle(content_hash="bench", tasks=("completions",), model_dir=args.model, tokenizer_dir=args.model)
    found: list[dict[str, Any]] = []
    few = Fp8Weight.few
    for name, (quantization, Fp8Weight.few) in FORMS.items():
        settings = EngineSettings.read({"quantization": quantization, "dtype": args.dtype, "kernels": "torch"})
        found.append({"weights": name, "perplexity": perplexity(bundle, settings, windows)})
    Fp8Weight.few = few
    publish("fp8_perplexity", found, dtype=args.dtype, window=args.window, windows=args.windows)


if __name__ == "__main__":
    main()
