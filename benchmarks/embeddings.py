"""Texts a second of our embedder beside sentence-transformers, same weights, dtype, threads and texts, in one run.

    python benchmarks/embeddings.py MODEL_DIR [--int8]

Mixed lengths: one text in four is long. "requests" embeds 32 texts a call, "bulk" 512 in one call (each with its peer).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from report import publish

from mlflow_llm.serving.bundle import Bundle
from mlflow_llm.serving.engine.embedder import load_embedder
from mlflow_llm.serving.engine.pooling import read_spec
from mlflow_llm.serving.settings import EngineSettings

WORDS = [
    "the",
    "model",
    "counts",
    "every",
    "token",
    "of",
    "a",
    "request",
    "and",
    "settles",
    "the",
    "ledger",
    "when",
    "its",
    "stream",
    "ends",
    "on",
    "a",
    "quiet",
    "server",
]


def make_texts(count: int) -> list[str]:
    source = random.Random(7)
    sizes = [source.randint(60, 160) if source.random() < 0.25 else source.randint(4, 40) for _ in range(count)]
    return [" ".join(source.choices(WORDS, k=size)) for size in sizes]


def texts_per_second(embed: Callable[[list[str]], Any], texts: list[str], batch: int, repeats: int) -> float:
    embed(texts[:batch])
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for first in range(0, len(texts), batch):
            embed(texts[first : first + batch])
        times.append(time.perf_counter() - start)
    return len(texts) / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(arguments.model_dir, device="cpu")
    bundle = Bundle(
        content_hash="", tasks=("embeddings",), model_dir=arguments.model_dir, tokenizer_dir=arguments.model_dir,
        embedding=read_spec(arguments.model_dir),
    )  # fmt: skip
    ours = load_embedder(bundle, EngineSettings(quantization="int8" if arguments.int8 else "none"))

    def embed_ours(texts: list[str]) -> Any:
        encoded = peer.tokenizer(texts, truncation=True, max_length=ours.max_length)["input_ids"]
        return ours.embed(encoded)

    texts = make_texts(512)
    rows = []
    for name, batch in (("requests of 32", 32), ("bulk of 512", 512)):
        theirs = texts_per_second(lambda t: peer.encode(t, show_progress_bar=False), texts, batch, arguments.repeats)
        mine = texts_per_second(embed_ours, texts, batch, arguments.repeats)
        rows.append(
            {"load": name, "sentence-transformers texts/s": theirs, "ours texts/s": mine, "ratio": mine / theirs}
        )
    name = "embeddings-int8" if arguments.int8 else "embeddings"
    publish(name, rows, threads=torch.get_num_threads(), quantization="int8" if arguments.int8 else "none")


if __name__ == "__main__":
    main()
