"""Texts per second of our embedder beside sentence-transformers, fastembed and OpenVINO, in one run on equal weights.

    python benchmarks/embeddings.py --model .cache/models/minilm

Each contender is a process in an environment of its own (`--environments`, as in `compare.py`). They take turns, repeat
by repeat, and figures are medians; ratios are medians of the ratios within a repeat. Mixed lengths: one text in four is
long. "requests" embeds 32 texts a call, "bulk" 512 in one; libraries that do not order texts by length get them so.
Vectors are set beside those of sentence-transformers in float32: the smallest cosine of 64 texts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from comparison.contenders import EMBEDDERS, made, start
from comparison.environments import Environments, Models
from comparison.protocol import Failed, Process
from comparison.without_amx import refuse_amx
from report import publish

REFERENCE = "sentence-transformers float32"
LOADS = {"requests of 32": 32, "bulk of 512": 512}
TEXTS, COMPARED = 512, 64
SENTENCE = "the model counts every token of a request and settles the ledger when its stream ends on a quiet server"
WORDS = SENTENCE.split()


def make_texts(count: int) -> list[str]:
    source = random.Random(7)
    sizes = [source.randint(60, 160) if source.random() < 0.25 else source.randint(4, 40) for _ in range(count)]
    return [" ".join(source.choices(WORDS, k=size)) for size in sizes]


def smallest_cosine(vectors: Any, others: Any) -> float:
    a, b = np.asarray(vectors), np.asarray(others)
    cosines = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    return float(cosines.min())


def parsed() -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/minilm"))
    parser.add_argument("--environments", type=Path, default=cache / "mlflow-llm" / "compare")
    parser.add_argument("--contenders", nargs="+", choices=EMBEDDERS, default=list(EMBEDDERS), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that one call may take")
    parser.add_argument("--without-amx", action="store_true", help="as on a processor without it: refused to all")
    parser.add_argument("--name", default="embeddings", help="of the result")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    args.model = args.model.resolve()
    environments = Environments(args.environments.resolve())
    models = Models(environments, args.model, None)
    processes: dict[str, Process] = {}
    texts, errors, versions = make_texts(TEXTS), dict[str, str](), dict[str, dict[str, str]]()
    cosines: dict[str, float] = {}
    # before AMX is refused to all processes started from here on; failures are reported below
    for name in args.contenders:
        with contextlib.suppress(Failed):
            if environment := EMBEDDERS[name].environment:
                environments.python(environment)
            made(EMBEDDERS[name], environments, models)
    if args.without_amx:
        refuse_amx()
    with contextlib.ExitStack() as ending:
        reference: Any = None
        for name in [REFERENCE, *(name for name in args.contenders if name != REFERENCE)]:
            try:
                process, versions[name] = start(name, EMBEDDERS[name], environments, models, args.model, args.limit)
                ending.callback(process.close)
                message = {"do": "embed", "texts": texts[:COMPARED], "batch": COMPARED, "shown": True}
                vectors = process.ask(message, args.limit)["vectors"]
                reference = vectors if reference is None else reference
                cosines[name] = smallest_cosine(vectors, reference)
                processes[name] = process
            except Failed as error:
                print(f"{name}: {error}", file=sys.stderr)
                errors[name] = str(error)
        seconds: dict[str, dict[str, list[float]]] = {name: {load: [] for load in LOADS} for name in processes}
        for repeat in range(args.repeats):
            for load, batch in LOADS.items():
                for name in list(processes)[:: 1 if repeat % 2 == 0 else -1]:
                    answer = processes[name].ask({"do": "embed", "texts": texts, "batch": batch}, args.limit)
                    seconds[name][load].append(answer["seconds"])
    rows = []
    for name, found in seconds.items():
        row: dict[str, Any] = {"contender": name}
        for load, each in found.items():
            row[f"{load}, texts/s"] = TEXTS / statistics.median(each)
            row[f"{load}, ×"] = statistics.median(
                theirs / mine for theirs, mine in zip(seconds[REFERENCE][load], each, strict=True)
            )
        rows.append({**row, "smallest cosine": f"{cosines[name]:.4f}"})
    publish(args.name, rows, versions=versions, errors=errors, repeats=args.repeats, without_amx=args.without_amx)


if __name__ == "__main__":
    main()
