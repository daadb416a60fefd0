"""Adapters in the native step: rows of one adapter are multiplied together, with the bits of each alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, make_model, save_bundle

from mlflow_llm.serving.engine.assembly import EngineParts, assemble
from mlflow_llm.serving.engine.attention.kv_cache import Row
from mlflow_llm.serving.engine.models.step_input import StepInput
from mlflow_llm.serving.engine.native import library
from mlflow_llm.serving.engine.native.adapters import HUGE_PAGE_BYTES, huge_pages
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings

pytestmark = [
    # peft 0.21 reads a property that transformers 5.23 deprecates
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.skipif(library.library() is None, reason="the native kernels are not here"),
]

RANKS = {"one": 1, "seven": 7, "wide": 67}  # below, across and beyond a block of memory
MODULES = {"one": ["q_proj", "down_proj"], "seven": "all-linear", "wide": "all-linear"}
NAMES = [None, *(["seven"] * 10), "wide", "one", None, "wide", "one", "one", "wide"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    bundle = save_bundle(make_model(FAMILIES["llama_wide"]()), folder / "model")
    for seed, (name, rank) in enumerate(RANKS.items()):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, init_lora_weights=False, target_modules=MODULES[name], use_dora=name == "seven")
        get_peft_model(make_model(FAMILIES["llama_wide"]()), config).save_pretrained(folder / name)
    return bundle, folder


KINDS = {"float32": {}, "int8": {"quantization": "int8"}, "bfloat16": {"dtype": "bfloat16"}}


@pytest.fixture(params=KINDS)
def parts(request: pytest.FixtureRequest, saved: tuple[Bundle, Path]) -> EngineParts:
    parts = assembled(saved, **KINDS[request.param])
    if parts.info.kernels != "native":
        pytest.skip(f"{request.param} is not native here: {parts.info.kernels_reason}")
    return parts


def assembled(saved: tuple[Bundle, Path], **more: object) -> EngineParts:
    bundle, folder = saved
    parts = assemble(bundle, EngineSettings(kv_cache_memory=1 << 24, max_num_seqs=32, **more))
    for name in RANKS:
        parts.lora.add(name, parts.lora.read(name, str(folder / name)))
    return parts


def logits(parts: EngineParts, names: Sequence[str | None], ids: Sequence[int]) -> torch.Tensor:
    """Return logits of a step of one token per sequence."""
    tokens = np.array(ids)
    for owner in range(len(names)):
        parts.cache.acquire(owner, "", tokens[owner : owner + 1].astype(np.int32))
    rows = [Row(owner, 0, 1) for owner in parts.cache.decode_order(range(len(names)))]
    with torch.inference_mode():
        found = parts.runner.step_forward.forward(StepInput(tokens, rows, list(names), range(len(names)))).clone()
    for owner in range(len(names)):
        parts.cache.release(owner, keep=False)
    return found


def test_a_row_is_bitwise_the_same_alone_and_among_rows_of_its_adapter(parts: EngineParts) -> None:
    """An adapter row has the same bits in full and partial groups and alone, on one thread and on three."""
    ids = list(range(3, 3 + len(NAMES)))
    threads = library.num_native_threads()
    try:
        library.use_threads(1)
        together = logits(parts, NAMES, ids)
        library.use_threads(3)
        assert torch.equal(logits(parts, NAMES, ids), together)
    finally:
        library.use_threads(threads)
    for i, name in enumerate(NAMES):
        assert torch.equal(logits(parts, [name], ids[i : i + 1])[0], together[i]), i


def test_the_native_step_adds_what_torch_adds(saved: tuple[Bundle, Path]) -> None:
    """Ranks below, across and beyond a block, with DoRA, equal torch's: to the last digits in float32, else to
    rounding."""
    ids = list(range(3, 3 + len(NAMES)))
    for kind, tolerance in (("float32", 1e-5), ("int8", 0.05), ("bfloat16", 0.05)):
        native = logits(assembled(saved, **KINDS[kind]), NAMES, ids)
        wanted = logits(assembled(saved, **KINDS[kind] | {"kernels": "torch"}), NAMES, ids).to(native.dtype)
        base = logits(assembled(saved, **KINDS[kind]), [None] * len(NAMES), ids)
        assert (native - wanted).abs().max() <= tolerance * wanted.abs().max(), kind
        assert not any(torch.equal(native[i], base[i]) for i, name in enumerate(NAMES) if name)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
def test_large_factors_lie_in_huge_pages() -> None:
    """Large factors begin at a huge page of private memory, because shared memory has none by default."""
    factors = huge_pages(3 << 20, torch.bfloat16)
    assert factors.data_ptr() % HUGE_PAGE_BYTES == 0
    factors.zero_()
    flags: set[str] = set()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(one, 16) for one in words[0].split("-"))
            inside = start <= factors.data_ptr() < end
        elif words[0] == "VmFlags:" and inside:
            flags = set(words[1:])
    assert "hg" in flags
    assert "sh" not in flags
