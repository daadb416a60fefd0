"""Prompts by ``varlen_attn``: its arguments over block tables, checked by a double that follows torch's
documentation."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_runs import run
from tiny_models import FAMILIES, greedy, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.attention.paged import varlen
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.settings import EngineSettings


def double(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *, scale: float,
    window_size: tuple[int, int], seqused_k: Any, block_table: Any, num_splits: int, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attend as torch documents: queries are the last of their sequences' ``seqused_k`` tokens, and see ``left`` tokens
    before themselves."""
    assert (cu_seq_k, num_splits, enable_gqa) == (None, 1, query.shape[1] != key.shape[2])
    assert {x.dtype for x in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
    assert max_q == int(cu_seq_q.diff().max())
    assert max_k == int(seqused_k.max())
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    for i, length in enumerate(seqused_k.tolist()):
        a, b = cu_seq_q[i : i + 2].tolist()
        keys, values = (x[block_table[i]].flatten(0, 1)[:length].transpose(0, 1) for x in (key, value))
        at, place = torch.arange(length - (b - a), length)[:, None], torch.arange(length)
        mask = ((place <= at) & ((place >= at - window_size[0]) | (window_size[0] < 0))).to(query.device)
        assert window_size[1] == 0
        one = query[a:b].transpose(0, 1)
        out[a:b] = F.scaled_dot_product_attention(
            one, keys, values, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        ).transpose(0, 1)
    return out


@pytest.fixture
def _no_memory() -> Iterator[None]:
    varlen.computes_right.cache_clear()
    yield
    varlen.computes_right.cache_clear()


def test_torchs_own_function_takes_the_arguments(caplog: pytest.LogCaptureFixture) -> None:
    """torch's own function accepts the arguments down to the operator, which has no CPU implementation; prompts then
    run without it and the reason is logged."""
    attend = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    if "seqused_k" not in inspect.signature(attend).parameters:
        pytest.skip("this torch's varlen_attn reads no block tables")
    caplog.set_level("INFO")
    assert not varlen.computes_right(torch.device("cpu"), torch.bfloat16, 16, 2, 64)
    (said,) = caplog.messages
    assert said.startswith("prompt chunks do not attend by varlen_attn: Could not run 'aten::")


@pytest.mark.usefixtures("_no_memory")
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_prompts_by_varlen_equal_generate(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of several prompts in one call, with grouped heads and within a window, give generate()'s tokens."""
    calls = []

    def counted(*args: Any, **more: Any) -> Any:
        calls.append(len(args[3]) - 1)
        return double(*args, **more)

    monkeypatch.setattr(varlen, "varlen_attn", counted)
    monkeypatch.setattr(varlen, "is_offered", lambda k, v, head_dim: True)
    model = make_model(FAMILIES[family]())
    settings = EngineSettings(
        max_num_seqs=4, max_num_batched_tokens=16, kv_cache_memory=1 << 22, kv_block_size=8, kernels="torch",
        dtype="float32",
    )  # fmt: skip
    core = EngineCore(save_bundle(model, tmp_path), settings)
    prompts = [prompt_of(n, seed) for seed, n in enumerate((40, 9, 23))]
    outcomes = run(core, *(request_of(str(i), prompt, max_tokens=6) for i, prompt in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        assert outcomes[str(i)].tokens[0] == greedy(model, prompt, 6)
    assert max(calls) > 1
    core.close()


@pytest.mark.usefixtures("_no_memory")
def test_it_is_used_only_if_a_trial_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that raises for block tables, as stock ones without FlashAttention 3 do, or that computes something else,
    is found by a trial; on CPU it is not tried."""
    asked = torch.device("cpu"), torch.float32, 16, 2, 8
    monkeypatch.setattr(varlen, "varlen_attn", double)
    assert varlen.computes_right(*asked)
    varlen.computes_right.cache_clear()
    monkeypatch.setattr(varlen, "varlen_attn", lambda q, *args, **more: torch.zeros_like(q))
    assert not varlen.computes_right(*asked)
    varlen.computes_right.cache_clear()

    def refuses(*args: Any, **more: Any) -> Any:
        raise RuntimeError("paged attention needs FA3")

    monkeypatch.setattr(varlen, "varlen_attn", refuses)
    assert not varlen.computes_right(*asked)
    blocks = torch.zeros(2, 16, 2, 8, dtype=torch.bfloat16)
    assert not varlen.is_offered(blocks, blocks, 8)
