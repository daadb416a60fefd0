"""Requests with ``max_tokens`` 0: the prompt is scored and nothing is sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_runs import Outcome, run, take
from tiny_models import greedy, prompt_of, request_of

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.events import TokenLogprob
from mlflow_llm.serving.interface.request import ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings

TOKEN_BYTES = 2 * 2 * 8 * 2 * 4  # layers, K and V heads, head width, K and V, float32


def core_of(bundle: Bundle, **more: Any) -> EngineCore:
    basic: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_cache_memory": 1 << 24}
    return EngineCore(bundle, EngineSettings(**{**basic, **more}))


@pytest.fixture
def core(tiny_bundle: Bundle) -> Iterator[EngineCore]:
    core = core_of(tiny_bundle)
    yield core
    core.check_integrity()
    core.close()


def scoring(name: str, prompt: tuple[int, ...], **more: Any) -> ValidRequest:
    return request_of(name, prompt, max_tokens=0, logprobs=1, prompt_logprobs=1, **more)


def scores(outcome: Outcome, index: int = 0) -> tuple[TokenLogprob, ...]:
    """Return a request's scores, after checking that it ended with "length" and without a token."""
    assert outcome.failed is None
    assert outcome.finished[index].reason == "length"
    assert outcome.finished[index].num_generated_tokens == 0
    assert not outcome.tokens
    return outcome.scored[index].logprobs


def assert_equal(found: tuple[TokenLogprob, ...], expected: tuple[TokenLogprob, ...]) -> None:
    """Compare scores within the tolerance of torch's kernels; ``test_native`` compares the native ones bit for bit."""
    assert [one.token_id for one in found] == [one.token_id for one in expected]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=1e-4)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 40])
def test_scores_are_the_models(core: EngineCore, tiny_llama: Any, length: int) -> None:
    """Each prompt token but the first has the model's own log probability, however the prompt falls into chunks."""
    prompt = prompt_of(length, 0)
    found = scores(run(core, scoring("a", prompt))["a"])
    with torch.inference_mode():
        expected = torch.log_softmax(tiny_llama(torch.tensor([prompt])).logits[0], -1)
    assert [one.token_id for one in found] == list(prompt[1:])
    for place, one in enumerate(found):
        assert one.logprob == pytest.approx(float(expected[place, one.token_id]), abs=1e-4)
        assert one.top[0][0] == int(expected[place].argmax())


def test_the_same_in_a_batch_and_with_a_warm_cache(core: EngineCore, tiny_llama: Any) -> None:
    """Scores are those of the prompt alone: beside others that generate, and after its KV is in the cache."""
    prompts = [prompt_of(20 + i, i) for i in range(3)]
    alone = [scores(run(core, scoring(f"alone{i}", p))[f"alone{i}"]) for i, p in enumerate(prompts)]
    busy = [request_of(f"busy{i}", prompt_of(9, 7 + i), max_tokens=10) for i in range(2)]
    outcomes = run(core, busy[0], *(scoring(str(i), p) for i, p in enumerate(prompts)), busy[1])
    for i in range(3):
        assert_equal(scores(outcomes[str(i)]), alone[i])
    for i in range(2):
        assert outcomes[f"busy{i}"].tokens[0] == greedy(tiny_llama, prompt_of(9, 7 + i), 10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bitwise_the_same_with_a_warm_prefix(tiny_bundle: Bundle, dtype: str) -> None:
    """With torch's kernels too, a prompt with a cached prefix has bitwise the same scores as a cold one."""
    core = core_of(tiny_bundle, dtype=dtype, kernels="torch")
    prompt = prompt_of(40, 5)
    cold = scores(run(core, scoring("cold", prompt))["cold"])
    run(core, request_of("other", (*prompt, 7, 8), max_tokens=3))
    warm = run(core, scoring("warm", prompt))["warm"]
    assert scores(warm) == cold
    assert warm.finished[0].num_cached_tokens == 0
    core.close()


def test_a_scored_prompt_is_reused_by_a_request_that_generates(core: EngineCore, tiny_llama: Any) -> None:
    """The KV of a scored prompt is reused by a request that generates."""
    prompt = prompt_of(24, 0)
    scores(run(core, scoring("a", prompt))["a"])
    after = run(core, request_of("b", prompt))["b"]
    assert after.finished[0].num_cached_tokens == len(prompt) - 1
    assert after.tokens[0] == greedy(tiny_llama, prompt, 12)


def test_several_prompts_and_choices(core: EngineCore) -> None:
    """Every choice of a prompt has its scores."""
    prompt = prompt_of(12, 0)
    outcome = run(core, scoring("a", prompt, n=3))["a"]
    for index in (1, 2):
        assert_equal(scores(outcome, index), scores(outcome, 0))


def test_a_prompt_of_the_whole_context(core: EngineCore) -> None:
    """A prompt that is only scored may fill the context; one that generates may not."""
    room = core.info.max_kv_tokens
    prompt = (prompt_of(64, 0) * (room // 64 + 1))[:room]
    assert len(scores(run(core, scoring("a", prompt))["a"])) == room - 1
    failed = run(core, request_of("b", prompt, max_tokens=1), scoring("c", (*prompt, 5)))
    assert [failed[name].failed.kind for name in "bc"] == ["context_too_long"] * 2


def test_without_scores_no_step_is_run(core: EngineCore) -> None:
    """If no log probabilities are asked for, the request ends without a step of the model."""
    steps = core.health().steps
    outcome = run(core, request_of("a", prompt_of(30, 0), max_tokens=0))["a"]
    assert outcome.finished[0].reason == "length"
    assert not outcome.scored
    assert core.health().steps == steps


def test_preemption_changes_no_score(core: EngineCore) -> None:
    """A prompt preempted while it is scored is scored again, whole."""
    prompt = prompt_of(60, 0)
    outcomes = {"a": Outcome()}
    core.add(scoring("a", prompt))
    take(core, outcomes, max_steps=2)
    (sequence,) = core.parts.scheduler.running
    assert 0 < sequence.num_computed < len(prompt)
    core.parts.scheduler.preempt(sequence)
    take(core, outcomes)
    assert_equal(scores(outcomes["a"]), scores(run(core, scoring("alone", prompt))["alone"]))


def test_abort_in_the_middle(core: EngineCore) -> None:
    """A prompt aborted while it is scored ends once, and all its memory is given back."""
    outcomes = {"a": Outcome(), "b": Outcome()}
    core.add(scoring("a", prompt_of(60, 0)))
    core.add(scoring("b", prompt_of(60, 1)))
    take(core, outcomes, max_steps=1)
    core.abort("a")
    take(core, outcomes)
    assert outcomes["a"].finished[0].reason == "abort"
    assert len(scores(outcomes["b"])) == 59


def test_numbers_that_are_not_finite(core: EngineCore) -> None:
    """Scores that are not finite fail their request and are never sent."""
    parts = core.parts.runner.step_forward
    native = getattr(parts, "weights", None)
    embedding = parts.model.get_input_embeddings().weight if native is None else native.embedding
    with torch.inference_mode():
        embedding[77] = float("nan")
    outcomes = run(core, scoring("bad", (5, 77, 6)), scoring("good", (9, 8, 7)))
    assert outcomes["bad"].failed is not None
    assert not outcomes["bad"].scored
    assert len(scores(outcomes["good"])) == 2
