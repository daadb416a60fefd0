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
from pathlib import Path
from typing import Any

import torch
from report import publish
from tokenizers import Tokenizer

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


def texts_per_second(
    embedders: list[Callable[[list[str]], Any]], texts: list[str], batch: int, repeats: int
) -> list[float]:
    """Medians; the embedders take turns, because a shared machine's pace moves from minute to minute."""
    for embed in embedders:
        embed(texts[:batch])
    times: list[list[float]] = [[] for _ in embedders]
    for _ in range(repeats):
        for embed, each in zip(embedders, times, strict=True):
            start = time.perf_counter()
            for first in range(0, len(texts), batch):
                embed(texts[first : first + batch])
            each.append(time.perf_counter() - start)
    return [len(texts) / statistics.median(each) for each in times]


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

    tokenizer = Tokenizer.from_file(str(Path(arguments.model_dir, "tokenizer.json")))
    tokenizer.enable_truncation(ours.max_length)
    tokenizer.no_padding()

    def embed_ours(texts: list[str]) -> Any:
        return ours.embed([encoding.ids for encoding in tokenizer.encode_batch_fast(texts)])  # as tasks/text.py does

    def embed_theirs(texts: list[str]) -> Any:
        return peer.encode(texts, show_progress_bar=False)

    texts = make_texts(512)
    rows = []
    for name, batch in (("requests of 32", 32), ("bulk of 512", 512)):
        theirs, mine = texts_per_second([embed_theirs, embed_ours], texts, batch, arguments.repeats)
        rows.append(
            {"load": name, "sentence-transformers texts/s": theirs, "ours texts/s": mine, "ratio": mine / theirs}
        )
    name = "embeddings-int8" if arguments.int8 else "embeddings"
    publish(name, rows, threads=torch.get_num_threads(), quantization="int8" if arguments.int8 else "none")


if __name__ == "__main__":
    main()
