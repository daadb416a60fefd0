"""The contender's side of `embeddings.py`: texts become vectors, and the time it took is returned.

    {"do": "load", "model": …, "options": …}  → {"versions": …, "servers": false}
    {"do": "embed", "texts": […], "batch": …, "shown": …} → {"seconds": …, "vectors": […]}

"batch" texts are in a call; vectors are returned if "shown" is set.

A line of JSON each, as `drive.py` has it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np


class Embedder:
    """An embedder. ``versions`` are those of the packages that determine its figures."""

    versions: dict[str, str]

    def embed(self, texts: list[str]) -> Any:
        """Return vectors [texts, dimensions], which need not be scaled to length 1."""
        raise NotImplementedError


def in_order_of_length(texts: list[str], embed: Callable[[list[str]], Any]) -> Any:
    """Sort texts by length, for libraries that pad a batch to its longest text and leave the order to the caller."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    vectors = np.asarray(embed([texts[i] for i in order]))
    found = np.empty_like(vectors)
    found[order] = vectors
    return found


def serve(load: Callable[[str, dict[str, Any]], Embedder]) -> None:
    """Answer messages until stdin ends. Output of libraries goes to stderr."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    embedder: Embedder | None = None
    for line in sys.stdin:
        message = json.loads(line)
        answer: dict[str, Any]
        try:
            if message["do"] == "load":
                embedder = load(message["model"], message["options"])
                answer = {"versions": embedder.versions, "servers": False}
            else:
                assert embedder is not None
                texts, batch, vectors = message["texts"], message["batch"], []
                start = time.perf_counter()
                for first in range(0, len(texts), batch):
                    vectors.append(embedder.embed(texts[first : first + batch]))
                seconds = time.perf_counter() - start
                answer = {"seconds": seconds}
                if message.get("shown"):
                    answer["vectors"] = np.concatenate([np.asarray(some) for some in vectors]).tolist()
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), file=told, flush=True)
    os._exit(0)
