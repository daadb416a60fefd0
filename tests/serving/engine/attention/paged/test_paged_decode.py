"""Split-KV attention over block tables in Triton: what the reference by torch gives, a row the same in any batch.

Where there is no GPU, Triton's interpreter runs the kernels line by line; it knows no bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import run
from paged_heads import DEVICE, Heads, example
from tiny_models import FAMILIES, greedy, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.attention.paged import decode
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.devices import triton_support
from mlflow_llm.serving.interface.settings import EngineSettings

pytest.importorskip("triton")
LENGTHS = (1, 150, 5)
SPLIT = 64


CASES = {
    "grouped": Heads(4, 2, 16, 16, 8),
    "odd widths, window": Heads(6, 2, 24, 40, 16, window=7),
    "cap and sinks": Heads(2, 2, 16, 16, 32, softcap=5.0, sinks=True),
    "wide, window, cap": Heads(4, 2, 512, 512, 16, window=40, softcap=5.0),
    "wider than a power of two": Heads(2, 2, 320, 272, 16, sinks=True),
    "latent, more heads than a program's": Heads(20, 1, 72, 48, 16, shared=True, dtype=torch.float16),
    "a large group": Heads(80, 1, 24, 16, 16),
    "one key head, window over parts, half": Heads(8, 1, 64, 64, 16, window=100, sinks=True, dtype=torch.float16),
}


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "enabled", lambda device: True)


@pytest.mark.parametrize("heads", CASES.values(), ids=CASES)
def test_kernel_equals_reference(heads: Heads) -> None:
    """The kernel equals the reference for groups, odd widths, windows, caps and sinks over lengths of one token to
    three parts; each row has the same bits alone as among others, however many parts the longest of them has."""
    q, k, v, tables, args = example(heads, len(LENGTHS), len(LENGTHS), max(LENGTHS))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    found = decode.attend_split(q, k, v, tables, lengths, args, longest=max(LENGTHS), split=SPLIT)
    wanted = decode.attend(q, k, v, tables, lengths, args)
    assert found.dtype == heads.dtype
    torch.testing.assert_close(found, wanted, atol=4e-3 if heads.dtype == torch.float16 else 2e-6, rtol=1e-3)
    for i in (1, 2):
        row = slice(i, i + 1)
        alone = decode.attend_split(q[row], k, v, tables[row], lengths[row], args, longest=8192, split=SPLIT)
        assert torch.equal(alone, found[row])


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("family", ["gpt_oss"])
def test_engine_with_kernels_equals_generate(family: str, tmp_path: Path) -> None:
    """A mixed batch over blocks, decoded by the kernels, gives generate()'s tokens."""
    model = make_model(FAMILIES[family]())
    settings = EngineSettings(
        max_num_seqs=3, max_num_batched_tokens=16, kv_cache_memory=1 << 20, kv_block_size=8, kernels="torch",
        dtype="float32",
    )  # fmt: skip
    core = EngineCore(save_bundle(model, tmp_path), settings)
    assert core.info.paged is not None
    assert core.info.paged.attention == "triton"
    prompts = [prompt_of(n, seed) for seed, n in enumerate((3, 14))]
    outcomes = run(core, *(request_of(str(i), prompt, max_tokens=4) for i, prompt in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        assert outcomes[str(i)].tokens[0] == greedy(model, prompt, 4)
    core.close()


@pytest.mark.usefixtures("_kernels")
def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial at load finds a kernel that fails or differs and gives the reason; wide heads are refused before."""
    k = torch.zeros(1, 16, 1, 8)

    def broken(*args: Any, **more: Any) -> Any:
        raise OSError("no compiler")

    decode.probe.cache_clear()
    monkeypatch.setattr(decode, "attend_split", broken)
    assert decode.why_not(k, k, 2) == "the kernel does not run: OSError: no compiler"
    decode.probe.cache_clear()
    monkeypatch.setattr(decode, "attend_split", lambda q, *args, **more: torch.zeros_like(q))
    assert decode.why_not(k, k, 2) == "the kernel differs from the reference by 1"
    decode.probe.cache_clear()
    assert "exceeds" in decode.why_not(torch.zeros(1, 16, 1, 640), k, 2)


def test_splits_are_as_small_as_their_sums_allow() -> None:
    """A split has 256 tokens where a row's sums take at most 4 MiB, else more, but at most a 64th of the context."""
    assert decode.split_tokens(4096, 32 * 128) == decode.split_tokens(131_072, 32 * 64) == 256
    assert decode.split_tokens(131_072, 32 * 128) == 512
    assert decode.split_tokens(131_072, 64 * 128) == 1024
    assert decode.split_tokens(131_072, 128 * 512) == decode.split_tokens(131_072 - 5, 128 * 512) == 2048
