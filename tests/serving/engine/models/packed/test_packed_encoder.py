"""An embedder's packed weights: mapped by the next start, under the same rules as a decoder's."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedding_models import PACKABLE
from tiny_models import hashes

from mlflow_llm.serving.engine.models import embedder
from mlflow_llm.serving.engine.models.packed import cache_file
from mlflow_llm.serving.engine.native.library import has_bf16, library
from mlflow_llm.serving.interface.bundle import Bundle, EmbeddingSpec
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.system.files import CACHE_VARIABLE

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler, or a CPU without AVX2")

TEXTS = [(5, 6, 7), (9,), (8, 7, 6, 5, 4, 3, 2, 9, 10, 11, 12), (4, 4, 5), tuple(range(3, 33))]
Load = Callable[..., tuple[embedder.Embedder, bool]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide the directory of packed files, of this test alone."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load an embedder and wait for its packed file; return also whether the weights' own files were left alone."""
    plain = embedder.AutoModel.from_pretrained
    read: list[object] = []
    monkeypatch.setattr(embedder.AutoModel, "from_pretrained", lambda *a, **k: (read.append(a), plain(*a, **k))[1])

    def loaded(bundle: Bundle, **settings: Any) -> tuple[embedder.Embedder, bool]:
        before = len(read)
        found = embedder.load_embedder(bundle, EngineSettings(**settings))
        for thread in threading.enumerate():
            if thread.name == "mlflow-llm-packed":
                thread.join()
        return found, len(read) == before

    return loaded


def bundle_of(root: Path, name: str = "bert", content_hash: str = "ab" * 32, **spec: Any) -> Bundle:
    torch.manual_seed(0)
    PACKABLE[name]().eval().save_pretrained(root / "model")
    return Bundle(
        content_hash=content_hash,
        tasks=("embeddings",),
        model_dir=str(root / "model"),
        tokenizer_dir="",
        embedding=EmbeddingSpec(**spec),
        model_hashes=hashes(root / "model"),
    )


ROUNDED = pytest.param(
    {"dtype": "bfloat16"}, marks=pytest.mark.skipif(not has_bf16(), reason="a CPU without AVX-512 BF16")
)


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, ROUNDED])
@pytest.mark.parametrize("name", ["bert", "bert without a pooler", "roberta", "mpnet", "modernbert"])
def test_a_mapped_embedder_is_the_same_to_the_bit(
    name: str, settings: dict[str, Any], tmp_path: Path, load: Load, cache: Path
) -> None:
    """The second start reads no weights; its vectors and facts are those of the first, whatever it pools by."""
    first, mapped = load(bundle_of(tmp_path, name), **settings)
    assert (mapped, first.info.kernels) == (False, "native")
    second, mapped = load(bundle_of(tmp_path, name), **settings)
    assert (mapped, second.info, second.max_length) == (True, first.info, first.max_length)
    assert np.array_equal(first.embed(TEXTS), second.embed(TEXTS))
    third, mapped = load(bundle_of(tmp_path, name, pooling="cls"), **settings, max_model_len=20)
    assert (mapped, third.max_length) == (True, 20)
    assert not np.array_equal(first.embed([TEXTS[0]]), third.embed([TEXTS[0]]))
    (file,) = cache.iterdir()
    assert [path.stat().st_mode & 0o777 for path in (cache, file)] == [0o700, 0o600]


def test_a_damaged_or_different_packed_embedder_is_not_used(tmp_path: Path, load: Load, cache: Path) -> None:
    """A packed file that is damaged or does not reproduce its hidden states is not used: the model is loaded in
    full."""
    bundle = bundle_of(tmp_path)
    expected = load(bundle)[0].embed(TEXTS)
    (file,) = cache.iterdir()
    key = file.name.partition("-")[0]
    arrays, facts = cache_file.open_packed(key) or ({}, {})
    changed = {name: -array if name == "expected" else array for name, array in arrays.items()}
    file.unlink()
    cache_file.write_packed(key, changed, facts, 1 << 30)
    found, mapped = load(bundle)
    assert not mapped
    assert np.array_equal(found.embed(TEXTS), expected)
    for path in cache.iterdir():
        os.truncate(path, path.stat().st_size - 4096)
    assert not load(bundle)[1]
    assert load(bundle)[1]


def test_embedders_that_are_loaded_in_full(tmp_path: Path, load: Load, cache: Path) -> None:
    """Without a content hash, native kernels or the setting an embedder is not packed."""
    load(bundle_of(tmp_path, content_hash="x"))
    load(bundle_of(tmp_path), kernels="torch")
    load(bundle_of(tmp_path), dtype="float16")
    load(bundle_of(tmp_path), packed_cache=0)
    load(bundle_of(tmp_path / "decoder", "llama"))
    assert not cache.exists()
