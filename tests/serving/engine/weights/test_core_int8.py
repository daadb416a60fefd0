"""int8 and bfloat16 through the whole engine on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_runs import run
from tiny_models import prompt_of, request_of

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.native.weight import NativeWeight
from mlflow_llm.serving.engine.weights.quantization import Int8Weight
from mlflow_llm.serving.engine.weights.weight_layouts import OneDnnWeight, PlainWeight
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.settings import EngineSettings

LENGTHS = (5, 37, 1, 12, 23)
CHANGES: dict[str, dict[str, Any]] = {"int8": {"quantization": "int8"}, "bfloat16": {"dtype": "bfloat16"}}


def core_of(bundle: Bundle, **more: Any) -> EngineCore:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "kv_cache_memory": 1 << 24, **more}
    return EngineCore(bundle, EngineSettings(**settings))


def logprobs(core: EngineCore, prompt: tuple[int, ...]) -> torch.Tensor:
    """Return the log probability of every token of the prompt but the first, as the engine scores them."""
    scored = run(core, request_of("scored", prompt, max_tokens=1, prompt_logprobs=0))["scored"].scored[0]
    return torch.tensor([score.logprob for score in scored.logprobs if score is not None])


def test_int8_gives_the_same_tokens_alone_and_in_a_batch(tiny_bundle: Bundle) -> None:
    """Greedy and sampled requests answer the same whatever shares their steps and however prompts are cut."""
    core = core_of(tiny_bundle, quantization="int8", prefix_caching=False)
    requests = [request_of(str(i), prompt_of(n, i), seed=i, temperature=float(i % 2)) for i, n in enumerate(LENGTHS)]
    together = run(core, *requests)
    for request in requests:
        alone = run(core, request)[request.request_id]
        assert alone.tokens == together[request.request_id].tokens
        assert alone.finished[0].reason == "length"
    core.close()


@pytest.mark.parametrize("name", CHANGES)
def test_reduced_precision_is_near_float32(tiny_bundle: Bundle, name: str) -> None:
    """Prompts score close to float32 but not exactly so, and the engine reports how it runs."""
    exact, reduced = core_of(tiny_bundle), core_of(tiny_bundle, **CHANGES[name])
    assert (reduced.info.quantization, reduced.info.dtype) == {
        "int8": ("int8", "float32"),
        "bfloat16": ("none", "bfloat16"),
    }[name]
    prompt = prompt_of(60, 3)
    wanted, found = logprobs(exact, prompt), logprobs(reduced, prompt)
    assert len(wanted) == 59
    assert (found - wanted).abs().mean() < 0.15 * wanted.abs().mean()
    assert not torch.equal(found, wanted)
    exact.close()
    reduced.close()


@pytest.mark.parametrize("name", CHANGES)
def test_reduced_precision_generates_in_a_batch(tiny_bundle: Bundle, name: str) -> None:
    """Every request of a mixed batch gets all its tokens, and the same ones when asked again."""
    core = core_of(tiny_bundle, **CHANGES[name])
    requests = [request_of(str(i), prompt_of(n, i)) for i, n in enumerate(LENGTHS)]
    first = run(core, *requests)
    assert [len(first[str(i)].tokens[0]) for i in range(len(LENGTHS))] == [12] * len(LENGTHS)
    core.close()
    again = core_of(tiny_bundle, **CHANGES[name])
    assert {k: o.tokens for k, o in run(again, *requests).items()} == {k: o.tokens for k, o in first.items()}
    again.close()


def wrong(matmul: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, x: matmul(self, x).flip(-1)


def not_a_number(matmul: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, x: matmul(self, x) * float("nan")


@pytest.mark.parametrize("fault", [wrong, not_a_number])
@pytest.mark.parametrize("name", ["float32", *CHANGES])
def test_grossly_wrong_linears_are_refused_at_load(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Any]
) -> None:
    """Packed linears whose output is permuted or NaN fail the self-test at load."""
    for kind in (NativeWeight, Int8Weight) if name == "int8" else (NativeWeight, OneDnnWeight, PlainWeight):
        monkeypatch.setattr(kind, "matmul", fault(kind.matmul))
    with pytest.raises(PackagingError, match="self-test"):
        core_of(tiny_bundle, **CHANGES.get(name, {}))


def test_embeddings_beside_generation_are_refused(tiny_bundle: Bundle) -> None:
    """An embedding model refuses to generate, and a generating one to embed."""
    bundle = Bundle(content_hash="x", tasks=("chat", "embeddings"), model_dir=tiny_bundle.model_dir, tokenizer_dir="")
    with pytest.raises(PackagingError, match="tasks: chat, embeddings"):
        core_of(bundle)
