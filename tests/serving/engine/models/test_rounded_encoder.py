"""Encoders with ``dtype: bfloat16``: linears by the native kernels, everything else in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedding_models import PACKABLE, bundle_of
from tiny_cross_encoders import save_cross_encoder

from mlflow_llm.serving.engine.models import cross_encoder, embedder
from mlflow_llm.serving.engine.native.library import NotNative, has_bf16, library
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings

native = pytest.mark.skipif(
    library() is None or not has_bf16(), reason="no compiler, or a CPU whose kernels do not take bfloat16"
)
TEXTS = [(5, 6, 7), (9,), (8, 7, 6, 5, 4, 3, 2, 9, 10, 11, 12), (4, 4, 5), tuple(range(3, 33))]
ROUNDED = EngineSettings(dtype="bfloat16")


def saved(folder: Path, kind: str) -> None:
    torch.manual_seed(0)
    PACKABLE[kind]().eval().save_pretrained(folder)


def relative(found: Any, wanted: Any) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@native
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("kind", ["bert", "roberta", "mpnet", "modernbert"])
def test_vectors_are_near_and_the_same_in_any_batch(tmp_path: Path, kind: str) -> None:
    """Vectors differ from float32's by the rounding of weights alone, and are the same in any batch."""
    saved(tmp_path, kind)
    exact = embedder.load_embedder(bundle_of(tmp_path), EngineSettings()).embed(TEXTS)
    rounded = embedder.load_embedder(bundle_of(tmp_path), ROUNDED)
    assert (rounded.info.kernels, rounded.info.dtype) == ("native", "bfloat16")
    found = rounded.embed(TEXTS)
    assert 1e-5 < relative(found, exact) < 1e-2
    alone = np.concatenate([rounded.embed([text]) for text in TEXTS])
    assert (alone == found).all()
    assert (rounded.embed(TEXTS * 9) == np.tile(found, (9, 1))).all()


def test_unsupported_encoders_are_computed_by_torch(tmp_path: Path) -> None:
    """A decoder that embeds stays in bfloat16 throughout, and the reason is reported."""
    saved(tmp_path, "llama")
    found = embedder.load_embedder(bundle_of(tmp_path, pooling="lasttoken"), ROUNDED)
    assert (found.info.kernels, found.info.dtype) == ("torch", "bfloat16")
    assert found.info.kernels_reason
    assert next(found.model.parameters()).dtype == torch.bfloat16


@native
@pytest.mark.parametrize("error", [NotNative("not this one"), PackagingError("in the self-test they differ")])
def test_an_encoder_that_the_kernels_refuse_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """An encoder that the kernels refuse is loaded again and computed by torch in bfloat16, with a warning."""

    def refuse(*args: Any, **more: Any) -> None:
        raise error

    saved(tmp_path, "bert")
    monkeypatch.setattr(embedder, "native_encoder", refuse)
    found = embedder.load_embedder(bundle_of(tmp_path), ROUNDED)
    assert (found.info.kernels, found.info.dtype) == ("torch", "bfloat16")
    assert "BertModel is not run natively in bfloat16" in caplog.text
    assert str(error) in caplog.text
    assert np.isfinite(found.embed(TEXTS)).all()


@native
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_a_cross_encoders_numbers_are_near(tmp_path: Path, kind: str) -> None:
    """Scores of a cross-encoder are close, because its head computes in float32."""
    save_cross_encoder(tmp_path, kind)
    bundle = Bundle(content_hash="x", tasks=("score",), model_dir=str(tmp_path), tokenizer_dir=str(tmp_path))
    exact = cross_encoder.load_cross_encoder(bundle, EngineSettings())
    rounded = cross_encoder.load_cross_encoder(bundle, ROUNDED)
    assert (rounded.info.kernels, rounded.info.dtype) == ("native", "bfloat16")
    found, wanted = rounded.embed(TEXTS), exact.embed(TEXTS)
    assert 1e-6 < abs(found - wanted).max() < 0.02 * max(1.0, abs(wanted).max())


@native
def test_int8_linears_keep_the_rest_in_float32(tmp_path: Path) -> None:
    """With int8 linears the rest is float32."""
    saved(tmp_path, "bert")
    plain = embedder.load_embedder(bundle_of(tmp_path), EngineSettings(quantization="int8"))
    both = embedder.load_embedder(bundle_of(tmp_path), EngineSettings(quantization="int8", dtype="bfloat16"))
    assert both.info.kernels == "native"
    assert relative(both.embed(TEXTS), plain.embed(TEXTS)) < 0.02
