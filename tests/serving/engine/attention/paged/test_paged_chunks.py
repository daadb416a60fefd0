"""Attention of prompt chunks over block tables in Triton: what the reference by torch gives, however a prompt is
cut.

Where there is no GPU, Triton's interpreter runs the kernel line by line; it knows no bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import run
from paged_heads import DEVICE, Heads, example
from tiny_models import FAMILIES, greedy, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.attention.kv_cache import AttentionArgs
from mlflow_llm.serving.engine.attention.paged import chunks
from mlflow_llm.serving.engine.attention.paged.chunks import ChunkTables
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.devices import triton_support
from mlflow_llm.serving.interface.settings import EngineSettings

pytest.importorskip("triton")
SIZES, STOPS = (70, 1, 9), (70, 33, 150)  # a whole prompt, one token after a prefix, some after a long one


CASES = {
    "grouped": Heads(4, 2, 16, 16, 8),
    "a group of three, odd widths, window": Heads(6, 2, 24, 40, 16, window=7),
    "cap and sinks": Heads(2, 2, 16, 16, 32, softcap=5.0, sinks=True),
    "one key head, window over tiles, half": Heads(8, 1, 64, 64, 16, window=100, sinks=True, dtype=torch.float16),
    "wide heads": Heads(2, 1, 256, 256, 16),
}
CUT = {"grouped": CASES["grouped"], "four of 128, half": Heads(4, 1, 128, 128, 16, dtype=torch.float16)}


@pytest.mark.parametrize("heads", CASES.values(), ids=CASES)
def test_kernel_equals_reference(heads: Heads) -> None:
    """One launch for several chunks equals the reference for groups, odd widths, windows, caps and sinks, with and
    without a prefix before the chunk."""
    q, k, v, block_tables, args = example(heads, sum(SIZES), len(SIZES), max(STOPS))
    tables = ChunkTables.make(SIZES, STOPS, block_tables)
    found, wanted = chunks.attend_by_kernel(q, k, v, tables, args), chunks.attend(q, k, v, tables, args)
    assert found.dtype == heads.dtype
    torch.testing.assert_close(found, wanted, atol=4e-3 if heads.dtype == torch.float16 else 3e-6, rtol=1e-3)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("name", ["grouped", "four of 128, half"])
def test_the_cut_of_a_prompt_changes_no_bit(name: str, window: int | None) -> None:
    """Each row is the same alone, among others, and in chunks that begin elsewhere: to the bit on a device. The
    interpreter multiplies by a BLAS, which may sum a row elsewhere in a tile in another order."""
    heads = CUT[name]._replace(window=window)
    q, k, v, block_tables, args = example(heads, sum(SIZES), len(SIZES), max(STOPS))
    whole = chunks.attend_by_kernel(q, k, v, ChunkTables.make(SIZES, STOPS, block_tables), args)
    for first, last in ((0, 70), (0, 31), (31, 70), (69, 70)):
        cut = ChunkTables.make([last - first], [last], block_tables[:1])
        found = chunks.attend_by_kernel(q[first:last], k, v, cut, args)
        near = 1e-6 if heads.dtype == torch.float32 else 1e-3
        torch.testing.assert_close(found, whole[first:last], rtol=0, atol=0 if DEVICE.type == "cuda" else near)


@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_engine_with_the_kernel_equals_generate(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of several prompts in one launch, beside decodes, give generate()'s tokens."""
    launches = []

    def counted(q: Any, k: Any, v: Any, tables: ChunkTables, args: AttentionArgs) -> Any:
        launches.append(len(tables.sizes))
        return by_kernel(q, k, v, tables, args)

    by_kernel = chunks.attend_by_kernel
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)
    monkeypatch.setattr(chunks, "attend_by_kernel", counted)
    model = make_model(FAMILIES[family]())
    settings = EngineSettings(
        max_num_seqs=3, max_num_batched_tokens=16, kv_cache_memory=1 << 20, kv_block_size=8, kernels="torch",
        dtype="float32",
    )  # fmt: skip
    core = EngineCore(save_bundle(model, tmp_path), settings)
    assert core.info.paged is not None
    assert core.info.paged.prefill == "triton"
    prompts = [prompt_of(n, seed) for seed, n in enumerate((5, 20, 9))]
    outcomes = run(core, *(request_of(str(i), prompt, max_tokens=4) for i, prompt in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        assert outcomes[str(i)].tokens[0] == greedy(model, prompt, 4)
    assert max(launches) > 1
    core.close()


def test_latent_attention_is_said_to_run_by_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts attend by torch where the cache keeps latents, whatever the kernel could do with such heads."""
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)
    settings = EngineSettings(kv_cache_memory=1 << 20, kv_block_size=8, kernels="torch", dtype="float32")
    core = EngineCore(save_bundle(make_model(FAMILIES["deepseek_v3"]()), tmp_path), settings)
    assert core.info.paged is not None
    assert core.info.paged.prefill == "torch"
    assert core.info.paged.prefill_reason == "latent attention is computed by torch"
    core.close()


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial at load finds a kernel that fails or differs and gives the reason; wide heads are refused before."""
    k = torch.zeros(1, 16, 1, 8)
    assert chunks.why_not(k, k, 2) == "there is no CUDA device"
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)

    def broken(*args: Any, **more: Any) -> Any:
        raise OSError("no compiler")

    chunks.probe.cache_clear()
    monkeypatch.setattr(chunks, "attend_by_kernel", broken)
    assert chunks.why_not(k, k, 2) == "the kernel does not run: OSError: no compiler"
    chunks.probe.cache_clear()
    monkeypatch.setattr(chunks, "attend_by_kernel", lambda q, *args: torch.zeros_like(q))
    assert chunks.why_not(k, k, 2) == "the kernel differs from the reference by 1"
    chunks.probe.cache_clear()
    assert "exceeds" in chunks.why_not(torch.zeros(1, 16, 1, 512), k, 2)
