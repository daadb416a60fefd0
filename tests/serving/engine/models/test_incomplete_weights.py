"""Checkpoints that lack tensors, which transformers would initialise at random."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from embedding_models import bundle_of, saved
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, make_model, save_bundle

from mlflow_llm.serving.engine.models.embedder import load_embedder
from mlflow_llm.serving.engine.models.loader import load_model
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings


def remove(folder: Path, is_lost: Callable[[str], bool]) -> set[str]:
    """Remove tensors from the weights in ``folder`` and return their names."""
    tensors = load_file(folder / "model.safetensors")
    lost = {name for name in tensors if is_lost(name)}
    kept = {name: tensor for name, tensor in tensors.items() if name not in lost}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return lost


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_decoder_that_lacks_a_tensor_is_refused_by_its_name(tmp_path: Path, family: str) -> None:
    """A decoder that lacks a norm is refused by the tensor's name; with all tensors it loads."""
    bundle = save_bundle(make_model(FAMILIES[family]()), tmp_path)
    load_model(bundle, EngineSettings())
    norm = {"gpt2": "transformer.h.1.ln_1.weight"}.get(family, "model.layers.1.input_layernorm.weight")
    assert remove(tmp_path, lambda name: name == norm)
    with pytest.raises(PackagingError, match=f"incomplete: they lack 1 of the model's tensors: {re.escape(norm)}$"):
        load_model(bundle, EngineSettings())


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    """Five missing tensors are named and the others counted."""
    bundle = save_bundle(make_model(FAMILIES["llama"]()), tmp_path)
    lost = remove(tmp_path, lambda name: ".layers.1." in name)
    with pytest.raises(PackagingError, match=f"they lack {len(lost)} of the model's tensors: (model[^,]*, ){{5}}…$"):
        load_model(bundle, EngineSettings())


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_is_the_embedding_need_not_be_stored(tmp_path: Path, tied: bool) -> None:
    """A tied head need not be stored; an untied head that is not stored is refused."""
    config = FAMILIES["llama"]()
    config.tie_word_embeddings = tied
    bundle = save_bundle(make_model(config), tmp_path)
    remove(tmp_path, lambda name: name == "lm_head.weight")
    if tied:
        load_model(bundle, EngineSettings())
        return
    with pytest.raises(PackagingError, match=r"they lack 1 of the model's tensors: lm_head\.weight$"):
        load_model(bundle, EngineSettings())


def test_an_encoder_that_lacks_a_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    """An embedder that lacks a layer norm is refused by the tensor's name."""
    saved(tmp_path, "bert")
    remove(tmp_path, lambda name: name == "encoder.layer.1.output.LayerNorm.weight")
    with pytest.raises(PackagingError, match=r"lack 1 .*: encoder\.layer\.1\.output\.LayerNorm\.weight$"):
        load_embedder(bundle_of(tmp_path), EngineSettings())


def test_an_encoder_needs_no_pooler(tmp_path: Path) -> None:
    """An encoder without a pooler loads, because embeddings do not use one."""
    saved(tmp_path, "bert")
    whole = load_embedder(bundle_of(tmp_path), EngineSettings()).embed([(5, 6, 7)])
    assert remove(tmp_path, lambda name: name.startswith("pooler."))
    assert (load_embedder(bundle_of(tmp_path), EngineSettings()).embed([(5, 6, 7)]) == whole).all()
