"""The packed weight cache: mapped by the next start, and never used if anything is wrong with a file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers as tf
from tiny_models import COMMON, make_model, save_bundle

from mlflow_llm.serving.engine.adapters.lora import LoraPool
from mlflow_llm.serving.engine.attention.kv_cache import Row
from mlflow_llm.serving.engine.attention.slot_cache import SlotKVCache
from mlflow_llm.serving.engine.models import loader
from mlflow_llm.serving.engine.models.native_decoder import NativeDecoder
from mlflow_llm.serving.engine.models.packed import cache_file
from mlflow_llm.serving.engine.models.packed.source import PackedSource
from mlflow_llm.serving.engine.models.step_input import StepInput
from mlflow_llm.serving.engine.native.library import library
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.system.files import CACHE_VARIABLE

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler, or a CPU without AVX2")

WIDE: dict[str, Any] = COMMON | {"hidden_size": 64, "max_position_embeddings": 2048}
DECODERS = {
    "llama_bias": lambda: tf.LlamaConfig(**WIDE, attention_bias=True, mlp_bias=True),
    "qwen3_tied": lambda: tf.Qwen3Config(**WIDE, head_dim=32, tie_word_embeddings=True),
    "mistral": lambda: tf.MistralConfig(**WIDE, sliding_window=37),
    "mixtral": lambda: tf.MixtralConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(
        **WIDE,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=80,
        mlp_only_layers=[0],
    ),
    # buffers that are one number, rotations of two kinds
    "gemma3": lambda: tf.Gemma3TextConfig(
        **WIDE, head_dim=32, sliding_window=37, layer_types=["sliding_attention", "full_attention"]
    ),
}
HASH = "ab" * 32


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide the directory of packed files, of this test alone."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Load a model and wait for its packed file; ``was_mapped`` says whether the weights' own files were left alone."""
    plain = loader.AutoModelForCausalLM.from_pretrained
    read: list[object] = []
    monkeypatch.setattr(
        loader.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: (read.append(a), plain(*a, **k))[1]
    )

    def loaded(bundle: Bundle, **settings: Any) -> tuple[Any, bool]:
        before = len(read)
        found = loader.load_model(bundle, EngineSettings(**settings))
        for thread in threading.enumerate():
            if thread.name == "mlflow-llm-packed":
                thread.join()
        return found, len(read) == before

    return loaded


def bundle_of(directory: Path, name: str = "mistral", content_hash: str = HASH) -> Bundle:
    return save_bundle(make_model(DECODERS[name]()), directory / "model", content_hash)


def logits_of(loaded: Any) -> torch.Tensor:
    tokens = np.random.default_rng(0).integers(0, 131, 90)
    cache = SlotKVCache(loaded.layers, num_slots=1, num_tokens=512, max_model_len=256, dtype=torch.float32)
    cache.acquire(0, "", tokens.astype(np.int32), at_most=0)
    return NativeDecoder(loaded.decoder, cache).forward(StepInput(tokens, [Row(0, 0, 90)], [None], range(90)))


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", sorted(DECODERS))
def test_a_mapped_model_is_the_same_to_the_bit(
    name: str, quantization: str, tmp_path: Path, load: Callable[..., Any], cache: Path
) -> None:
    """The second start reads no weights, and its logits, linears and facts are those of the first."""
    bundle = bundle_of(tmp_path, name)
    first, mapped = load(bundle, quantization=quantization)
    assert not mapped
    second, mapped = load(bundle, quantization=quantization, max_model_len=128)
    assert (mapped, second.kernels_reason, second.max_model_len) == (True, "", 128)
    assert torch.equal(logits_of(first), logits_of(second))
    assert first.decoder.tied == second.decoder.tied == first.config.tie_word_embeddings
    assert (first.layers, first.vocab_size, first.dtype) == (second.layers, second.vocab_size, second.dtype)
    pools = [LoraPool(one.model, one.holder) for one in (first, second)]
    assert pools[0].shapes == pools[1].shapes
    assert pools[0].head == pools[1].head
    other = "int8" if quantization == "none" else "none"
    assert not load(bundle, quantization=other)[1]
    assert len(list(cache.iterdir())) == 2


def test_permissions_of_the_packed_file(tmp_path: Path, load: Callable[..., Any], cache: Path) -> None:
    """Packed files are readable by the owner alone: 0600 in a directory 0700."""
    load(bundle_of(tmp_path))
    (file,) = cache.iterdir()
    assert [path.stat().st_mode & 0o777 for path in (cache, file)] == [0o700, 0o600]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4096)


def open_to_others(file: Path) -> None:
    file.chmod(0o644)


def link(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


def another_format(file: Path) -> None:
    """Write a file that is complete by its name but not a packed file."""
    import hashlib

    data = b"x" * 8192
    file.unlink()
    key = file.name.partition("-")[0]
    path = file.with_name(f"{key}-{hashlib.sha256(data).hexdigest()}")
    path.write_bytes(data)
    path.chmod(0o600)


@pytest.mark.parametrize("damage", [flip, cut, open_to_others, link, another_format])
def test_damaged_or_foreign_files_are_not_used(
    damage: Callable[[Path], None], tmp_path: Path, load: Callable[..., Any], cache: Path
) -> None:
    """With a damaged or foreign file the model is loaded in full, and the file is removed and written anew."""
    bundle = bundle_of(tmp_path)
    expected = logits_of(load(bundle)[0])
    (file,) = cache.iterdir()
    damage(file)
    found, mapped = load(bundle)
    assert not mapped
    assert torch.equal(logits_of(found), expected)
    assert load(bundle)[1]
    assert len(list(cache.iterdir())) == 1


def test_a_directory_of_others_is_not_used(tmp_path: Path, load: Callable[..., Any], cache: Path) -> None:
    """A directory that others may write to is neither read nor written."""
    bundle = bundle_of(tmp_path)
    load(bundle)
    cache.chmod(0o777)
    assert not load(bundle)[1]
    assert len(list(cache.iterdir())) == 1


def test_packed_weights_with_other_logits_are_refused(tmp_path: Path, load: Callable[..., Any], cache: Path) -> None:
    """A complete file whose model does not reproduce the stored logits is not used."""
    bundle = bundle_of(tmp_path)
    load(bundle)
    (file,) = cache.iterdir()
    key = file.name.partition("-")[0]
    arrays, facts = cache_file.open_packed(key) or ({}, {})
    changed = {name: -array if name == "test/0/expected" else array for name, array in arrays.items()}
    file.unlink()
    cache_file.write_packed(key, changed, facts, 1 << 30)
    assert not load(bundle)[1]


def test_packed_cache_bounds_its_bytes(tmp_path: Path, load: Callable[..., Any], cache: Path) -> None:
    """The least recently used files are evicted; a model larger than the bound is not stored; 0 disables the cache."""
    one, two = (bundle_of(tmp_path / name, name, str(i) * 64) for i, name in enumerate(sorted(DECODERS)[:2]))
    load(one)
    (file,) = cache.iterdir()
    assert not load(one, packed_cache=0)[1]
    os.utime(file, (0, 0))
    load(two, packed_cache=int(file.stat().st_size * 1.5))
    assert (file.exists(), len(list(cache.iterdir()))) == (False, 1)
    load(one, packed_cache=1000)
    assert len(list(cache.iterdir())) == 1


def test_unfinished_files_are_swept(tmp_path: Path, load: Callable[..., Any], cache: Path) -> None:
    """Files that a killed engine left unfinished are removed by a later write; recent ones stay."""
    cache.mkdir(mode=0o700, parents=True)
    old, new = cache / ".part-a-1", cache / ".part-b-2"
    for path in (old, new):
        path.touch()
    os.utime(old, (time.time() - 2 * cache_file.ABANDONED_SECONDS,) * 2)
    load(bundle_of(tmp_path))
    assert (old.exists(), new.exists()) == (False, True)


def test_a_model_without_a_content_hash_is_not_kept(tmp_path: Path, load: Callable[..., Any], cache: Path) -> None:
    """No packed file is written without a content hash or for a model that does not run natively."""
    load(bundle_of(tmp_path, content_hash="tiny"))
    load(bundle_of(tmp_path), kernels="torch")
    load(bundle_of(tmp_path), dtype="float16")
    assert not cache.exists()


def test_a_damaged_source_is_not_kept(
    tmp_path: Path, load: Callable[..., Any], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights that differ from the content hash are not packed, although a load compares sizes only."""
    bundle = bundle_of(tmp_path)
    weights = tmp_path / "model/model.safetensors"
    intact = weights.read_bytes()
    flip(weights)
    load(bundle)
    assert list(cache.glob("*")) == []
    assert f"{weights} was changed: its SHA-256 is not the one in the model's manifest" in caplog.text
    weights.write_bytes(intact)
    assert load(bundle)[1] is False
    assert load(bundle)[1] is True


def test_a_source_that_changes_meanwhile_is_not_kept(tmp_path: Path) -> None:
    """Weights that change during the load are not packed, even if they hash correctly afterwards."""
    source = PackedSource(bundle_of(tmp_path))
    weights = tmp_path / "model/model.safetensors"
    source.check()
    intact = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(intact)
    for check in (source.check, source.check_unchanged):
        with pytest.raises(ValueError, match=r"model\.safetensors was changed while the model was loaded"):
            check()


def test_a_model_without_a_manifest_is_not_kept(tmp_path: Path, load: Callable[..., Any], cache: Path) -> None:
    """A model without a manifest is not packed, because its files cannot be checked against its hash."""
    load(msgspec.structs.replace(bundle_of(tmp_path), model_hashes={}))
    assert not cache.exists()


def test_a_full_disk_keeps_nothing(
    tmp_path: Path, load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a full disk the model runs, and the log says that it was not packed."""
    (tmp_path / "cache").write_text("a file")
    found, mapped = load(bundle_of(tmp_path))
    assert (found.decoder is not None, mapped) == (True, False)
    assert "packed weights are not kept" in caplog.text
