"""Cross-encoders: the scores of sentence-transformers' ``CrossEncoder``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_cross_encoders import PAIRS, save_cross_encoder, tokenizer
from transformers import BertModel

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.models.cross_encoder import CrossEncoder, load_cross_encoder
from mlflow_llm.serving.interface.bundle import Bundle, CrossEncoderSpec
from mlflow_llm.serving.interface.errors import ContextTooLong, PackagingError
from mlflow_llm.serving.interface.events import Embedded, Failed
from mlflow_llm.serving.interface.request import Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings

KINDS = ["bert", "distilbert", "electra", "modernbert", "modernbert-mean", "mpnet", "xlm-roberta"]
NATIVE = ["bert", "modernbert", "mpnet"]


def bundle_of(folder: Path, **spec: Any) -> Bundle:
    return Bundle(
        content_hash="x",
        tasks=("score",),
        model_dir=str(folder),
        tokenizer_dir=str(folder),
        cross_encoder=CrossEncoderSpec(**spec),
    )


def encoded(kind: str) -> tuple[list[list[int]], list[int]]:
    """Return ``PAIRS`` as transformers tokenises them, and where the second type begins."""
    found = tokenizer(kind, 64)([list(pair) for pair in PAIRS])
    types = found.get("token_type_ids") or [[0] * len(ids) for ids in found["input_ids"]]
    return found["input_ids"], [one.index(1) if 1 in one else len(one) for one in types]


def reference(folder: Path) -> Any:
    """Return the logits of sentence-transformers, before its activation."""
    from sentence_transformers import CrossEncoder as Reference

    return Reference(str(folder), device="cpu", activation_fn=torch.nn.Identity()).predict(PAIRS)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_sentence_transformers(tmp_path: Path, kind: str, kernels: str) -> None:
    """Pairs of every length and both token types score within 1e-5 of the reference, with any kernels."""
    save_cross_encoder(tmp_path, kind)
    ours = load_cross_encoder(bundle_of(tmp_path), EngineSettings(kernels=kernels))
    expected = reference(tmp_path)
    assert np.ptp(expected) > 0.03
    assert ours.embed(*encoded(kind))[:, 0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", NATIVE)
def test_a_bert_with_token_types_runs_natively(kind: str, tmp_path: Path) -> None:
    """A BERT with token types runs by the native kernels where there are any."""
    from mlflow_llm.serving.engine.native.library import library

    if library() is None:
        pytest.skip("no compiler, or a CPU without AVX2")
    save_cross_encoder(tmp_path, kind)
    assert load_cross_encoder(bundle_of(tmp_path), EngineSettings()).info.kernels == "native"


def test_alone_and_in_a_batch(tmp_path: Path) -> None:
    """A pair's score does not depend on the pairs beside it."""
    save_cross_encoder(tmp_path, "bert")
    ours = load_cross_encoder(bundle_of(tmp_path), EngineSettings())
    ids, seconds = encoded("bert")
    alone = [ours.embed([one], [second])[0, 0] for one, second in zip(ids, seconds, strict=True)]
    assert ours.embed(ids * 30, seconds * 30)[:, 0] == pytest.approx(alone * 30, abs=1e-6)


def test_int8(tmp_path: Path) -> None:
    """With int8 linears scores stay close, and so does the order of documents that are far apart."""
    save_cross_encoder(tmp_path, "bert")
    ours = load_cross_encoder(bundle_of(tmp_path), EngineSettings(quantization="int8"))
    exact, found = reference(tmp_path), ours.embed(*encoded("bert"))[:, 0]
    assert abs(found - exact).max() < 0.25 * max(1.0, abs(exact).max())


def test_unsupported_models_are_refused_at_load(tmp_path: Path) -> None:
    """A head of several labels, a missing head and an unsupported encoder are refused, each with its reason."""
    save_cross_encoder(tmp_path / "three", labels=3)
    with pytest.raises(PackagingError, match="a head of one label; this one has 3"):
        load_cross_encoder(bundle_of(tmp_path / "three"), EngineSettings())
    save_cross_encoder(tmp_path / "biases", "deberta")
    with pytest.raises(PackagingError, match=r"DebertaV2Model is not supported .*cannot be replaced"):
        load_cross_encoder(bundle_of(tmp_path / "biases"), EngineSettings())
    save_cross_encoder(tmp_path / "headless")
    BertModel.from_pretrained(tmp_path / "headless").save_pretrained(tmp_path / "headless")
    with pytest.raises(PackagingError, match=r"the weights are incomplete: .*classifier"):
        load_cross_encoder(bundle_of(tmp_path / "headless"), EngineSettings())


def test_lengths_are_limited(tmp_path: Path) -> None:
    """No pair may be longer than the model, its configuration or the setting allows."""
    save_cross_encoder(tmp_path, "xlm-roberta")
    limits = [
        load_cross_encoder(bundle_of(tmp_path, **spec), EngineSettings(**settings)).info.max_model_len
        for spec, settings in (({}, {}), ({"max_length": 48}, {}), ({}, {"max_model_len": 20}))
    ]
    assert limits == [64, 48, 20]
    ours: CrossEncoder = load_cross_encoder(bundle_of(tmp_path), EngineSettings())
    with pytest.raises(ContextTooLong):
        ours.embed([[5] * 65])


def test_through_the_engine(tmp_path: Path) -> None:
    """The engine returns a score for each pair, and refuses requests that it cannot run."""
    save_cross_encoder(tmp_path, "bert")
    core = EngineCore(bundle_of(tmp_path), EngineSettings(max_num_batched_tokens=32))
    ids, seconds = encoded("bert")
    whole = ValidRequest(
        request_id="a",
        task="score",
        model="m",
        sequences=tuple(Sequence(prompt_token_ids=tuple(one)) for one in ids),
        second_from=tuple(seconds),
    )
    core.add(whole)
    core.add(ValidRequest(request_id="b", task="embeddings", model="m", sequences=whole.sequences))
    core.add(ValidRequest(request_id="c", task="score", model="m", sequences=whole.sequences, second_from=(1,)))
    events = [output for _ in range(8) for output in core.step()]
    numbers = {e.index: np.frombuffer(e.vector, "<f4")[0] for _, name, e in events if isinstance(e, Embedded)}
    assert [numbers[i] for i in range(len(ids))] == pytest.approx(reference(tmp_path), abs=1e-5)
    assert {name: e.param for _, name, e in events if isinstance(e, Failed)} == {"b": "task", "c": "second_from"}
    core.close()
