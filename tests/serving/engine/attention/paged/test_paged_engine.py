"""The engine with paged KV, as on CUDA: generate()'s tokens, whatever is shared, forked and preempted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import TOKEN_BYTES, Outcome, run, take
from tiny_models import FAMILIES, greedy, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.attention.paged.cache import PagedKVCache
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.request import Beams
from mlflow_llm.serving.interface.settings import EngineSettings


def settings(**more: Any) -> EngineSettings:
    """Return settings for small models in float32, in which tokens equal generate()'s on every device."""
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_cache_memory": 1 << 24}
    return EngineSettings(**{**small, "kv_block_size": 8, "kernels": "torch", "dtype": "float32", **more})


@pytest.fixture
def core(tiny_bundle: Bundle) -> Iterator[EngineCore]:
    core = EngineCore(tiny_bundle, settings())
    assert isinstance(core.parts.cache, PagedKVCache)
    yield core
    core.check_integrity()
    core.close()


# grouped heads; a cap and windows; sinks; latent attention
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_equals_generate(family: str, tmp_path: Path) -> None:
    """Greedy tokens of a mixed batch with chunked prefill equal generate()'s, token for token."""
    model = make_model(FAMILIES[family]())
    core = EngineCore(save_bundle(model, tmp_path), settings())
    prompts = [prompt_of(n, seed) for seed, n in enumerate((1, 3, 40, 9, 23, 17))]
    outcomes = run(core, *(request_of(str(i), p) for i, p in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        assert outcomes[str(i)].tokens[0] == greedy(model, prompt, 12), (family, i)
    core.close()


def test_prefixes_choices_and_beams_share_blocks(core: EngineCore, tiny_llama: Any) -> None:
    """Continued texts, choices of a prompt and beams of a search share blocks and give the texts that slots give."""
    prompt = prompt_of(30, 0)
    first = run(core, request_of("a", prompt))["a"].tokens[0]
    longer = (*prompt, *first, 5)
    again = run(core, request_of("b", longer))["b"]
    assert again.tokens[0] == greedy(tiny_llama, longer, 12)
    assert again.finished[0].num_cached_tokens >= 40  # whole blocks of 41 tokens whose KV is there
    choices = run(core, request_of("c", prompt_of(30, 1), n=3, temperature=0.8, seed=4))["c"]
    assert [choices.finished[i].num_cached_tokens for i in range(3)] == [0, 29, 29]
    beams = Beams(width=4, length_penalty=1.0)
    found = run(core, request_of("d", prompt, n=2, beams=beams))["d"]
    alone = tiny_llama.generate(
        torch.tensor([prompt]), max_new_tokens=12, num_beams=4, num_return_sequences=2, do_sample=False,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    assert [found.tokens[i] for i in range(2)] == alone[:, 30:].tolist()


def test_preemption_changes_no_token(tiny_bundle: Bundle, tiny_llama: Any) -> None:
    """With blocks for a fraction of the batch, sequences are preempted and still give the same tokens."""
    core = EngineCore(tiny_bundle, settings(kv_cache_memory=108 * TOKEN_BYTES, max_num_seqs=8))
    prompts = [prompt_of(20, i) for i in range(5)]
    outcomes = run(core, *(request_of(str(i), p, max_tokens=30) for i, p in enumerate(prompts)))
    assert core.parts.scheduler.num_preemptions > 0
    for i, prompt in enumerate(prompts):
        assert outcomes[str(i)].tokens[0] == greedy(tiny_llama, prompt, 30)
    core.close()


def test_numbers_that_are_not_finite_fail_one_request(core: EngineCore, tiny_llama: Any) -> None:
    """KV that is not finite fails its own request; no later request reads it from the reused blocks."""
    core.add(request_of("bad", prompt_of(10, 0), max_tokens=40))
    outcomes = {"bad": Outcome(), "good": Outcome()}
    take(core, outcomes, max_steps=3)
    cache = core.parts.cache
    cache.layers[0].v[cache.blocks_of(core.parts.scheduler.running[0].id)] = float("nan")
    core.add(request_of("good", prompt_of(20, 1)))
    take(core, outcomes)
    assert outcomes["bad"].failed is not None
    assert outcomes["good"].tokens[0] == greedy(tiny_llama, prompt_of(20, 1), 12)
    assert run(core, request_of("again", prompt_of(10, 0)))["again"].tokens[0] == greedy(
        tiny_llama, prompt_of(10, 0), 12
    )


def test_searches_are_bounded_in_whole_blocks(tiny_bundle: Bundle) -> None:
    """A search whose beams fit by their tokens but not by their blocks is refused by its width."""
    core = EngineCore(tiny_bundle, settings(kv_cache_memory=(8 * 8 + 8) * TOKEN_BYTES))
    beams = Beams(width=4, length_penalty=1.0)
    outcome = run(core, request_of("a", prompt_of(5, 0), max_tokens=11, beams=beams))["a"]
    assert outcome.failed is None
    outcome = run(core, request_of("b", prompt_of(5, 0), max_tokens=12, beams=beams))["b"]
    assert outcome.failed is not None
    assert "at most 2" in outcome.failed.message
    core.close()


def test_info_says_how_blocks_run(tiny_bundle: Bundle) -> None:
    """The engine's information names block size, attention and recorded steps, with the reasons; on CPU, since
    ``test_cuda`` looks at a device's."""
    core = EngineCore(tiny_bundle, settings(device="cpu"))
    paged = core.info.paged
    core.close()
    assert paged is not None
    assert (paged.kv_block_size, paged.attention, paged.attention_reason) == (8, "torch", "there is no CUDA device")
    assert paged.cuda_graphs == (1, 2, 4)
    assert paged.cuda_graphs_reason.startswith("there is no CUDA device")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"kernels": "auto", "device": "cpu"},
            "kv_block_size: 8 is not allowed; expected null on CPU with kernels auto",
        ),
        ({"kv_cache_memory": 15 * TOKEN_BYTES}, f"bytes is not enough; expected at least {16 * TOKEN_BYTES}"),
    ],
)
def test_unsupported_block_settings_are_refused(tiny_bundle: Bundle, more: dict[str, Any], message: str) -> None:
    """Blocks with the native CPU kernels, and memory too small for a block, are refused by name."""
    with pytest.raises(PackagingError, match=message):
        EngineCore(tiny_bundle, settings(**more))
