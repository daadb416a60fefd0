"""The engine core: every request ends once, with the tokens it would have alone, whatever happens around it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_runs import TOKEN_BYTES, Outcome, run, take
from tiny_models import greedy, prompt_of, request_of

from mlflow_llm.serving.engine import assembly
from mlflow_llm.serving.engine.attention import slab
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.forward.runner import ModelForward
from mlflow_llm.serving.engine.in_process import InProcessEngine
from mlflow_llm.serving.engine.models.step_input import StepInput
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.engine import Engine
from mlflow_llm.serving.interface.errors import PackagingError
from mlflow_llm.serving.interface.events import Finished, Tokens
from mlflow_llm.serving.interface.settings import EngineSettings


def settings(**more: Any) -> EngineSettings:
    return EngineSettings(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_cache_memory": 1 << 24, **more})


@pytest.fixture
def core(tiny_bundle: Bundle) -> Iterator[EngineCore]:
    core = EngineCore(tiny_bundle, settings())
    yield core
    core.check_integrity()
    core.close()


def test_too_little_free_memory_is_said(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory for less than the context gives a warning, next to none is refused, and an explicit setting gives
    neither."""
    free = 0
    monkeypatch.setattr(assembly, "free_memory", lambda device: free)
    free = 2 * 100 * TOKEN_BYTES
    EngineCore(tiny_bundle, settings(kv_cache_memory=None)).close()
    said = "the KV cache holds 100 tokens, less than the model's context of"
    assert [said in record.message for record in caplog.records] == [True]
    caplog.clear()
    free = 2 * 20 * TOKEN_BYTES
    with pytest.raises(PackagingError, match=r"the KV cache holds 20 tokens, .*kv_cache_memory sets more or less"):
        EngineCore(tiny_bundle, settings(kv_cache_memory=None))
    EngineCore(tiny_bundle, settings(kv_cache_memory=20 * TOKEN_BYTES)).close()
    assert not caplog.records


def test_preemption_changes_no_token(tiny_bundle: Bundle, tiny_llama: Any) -> None:
    """With memory for a fraction of the batch, sequences are preempted and still give the same tokens."""
    core = EngineCore(tiny_bundle, settings(kv_cache_memory=100 * TOKEN_BYTES, max_num_seqs=8))
    prompts = [prompt_of(20, i) for i in range(5)]
    outcomes = run(core, *(request_of(str(i), p, max_tokens=30) for i, p in enumerate(prompts)))
    assert core.parts.scheduler.num_preemptions > 0
    for i, prompt in enumerate(prompts):
        assert outcomes[str(i)].tokens[0] == greedy(tiny_llama, prompt, 30)
    core.close()


def test_prefix_is_reused(core: EngineCore, tiny_llama: Any) -> None:
    """A prompt that extends an earlier conversation reuses its KV, reports how much, and gives the same tokens."""
    first = prompt_of(30, 0)
    answer = run(core, request_of("a", first))["a"].tokens[0]
    longer = (*first, *answer, 5, 6, 7)
    outcome = run(core, request_of("b", longer))["b"]
    assert outcome.tokens[0] == greedy(tiny_llama, longer, 12)
    assert outcome.finished[0].num_cached_tokens == len(first) + len(answer) - 1  # the last token was never fed


def test_prefix_is_copied(core: EngineCore, tiny_llama: Any) -> None:
    """A prompt that shares only the beginning copies it and leaves the earlier one usable."""
    shared, one, two = prompt_of(24, 0), prompt_of(30, 1), prompt_of(9, 2)
    run(core, request_of("a", shared + one))
    outcome = run(core, request_of("b", shared + two))["b"]
    assert outcome.finished[0].num_cached_tokens == len(shared)
    assert outcome.tokens[0] == greedy(tiny_llama, shared + two, 12)
    again = run(core, request_of("c", shared + one))["c"]
    assert again.finished[0].num_cached_tokens == len(shared + one) - 1
    assert again.tokens[0] == greedy(tiny_llama, shared + one, 12)


def test_prefix_caching_can_be_off(tiny_bundle: Bundle) -> None:
    """Without prefix caching nothing is reused."""
    core = EngineCore(tiny_bundle, settings(prefix_caching=False))
    for name in "ab":
        assert run(core, request_of(name, prompt_of(30, 0)))[name].finished[0].num_cached_tokens == 0
    assert core.health().kv_tokens_used == 0
    core.close()


def test_choices_share_their_prompt(core: EngineCore) -> None:
    """The prompt of n choices is computed once; different seeds give different texts."""
    prompt = prompt_of(40, 0)
    outcome = run(core, request_of("a", prompt, n=4, temperature=1.0, seed=7))["a"]
    assert [outcome.finished[i].num_cached_tokens for i in range(4)] == [0, 39, 39, 39]
    assert len({tuple(outcome.tokens[i]) for i in range(4)}) == 4


def test_sampling_is_the_same_alone_and_in_a_batch(core: EngineCore) -> None:
    """A seeded request samples the same tokens whatever else runs."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20, "min_p": 0.01},
        {"temperature": 1.0, "typical_p": 0.8},
        {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    ]
    requests = [request_of(f"r{i}", prompt_of(11 + i, i), seed=i, **kind) for i, kind in enumerate(kinds)]
    together = run(core, *requests)
    for request in requests:
        alone = run(core, request)[request.request_id]
        assert len(alone.tokens[0]) == 12
        assert alone.tokens[0] == together[request.request_id].tokens[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_resumed_text_is_the_uninterrupted_one(core: EngineCore, temperature: float) -> None:
    """A continuation after k delivered tokens goes on exactly as the first attempt would have."""
    prompt = prompt_of(15, 3)
    kind = {"temperature": temperature, "seed": 11, "frequency_penalty": 0.3, "max_tokens": 20}
    whole = run(core, request_of("whole", prompt, **kind))["whole"].tokens[0]
    for k in (1, 7, 19):
        outcome = run(core, request_of(f"k{k}", prompt, resumed=whole[:k], **kind))[f"k{k}"]
        assert outcome.tokens[0] == whole[k:]
        assert outcome.finished[0].num_generated_tokens == 20
    done = run(core, request_of("done", prompt, resumed=whole, **kind))["done"]
    assert done.tokens[0] == []
    assert done.finished[0].reason == "length"


def test_stop_tokens_and_min_tokens(core: EngineCore, tiny_llama: Any) -> None:
    """A stop token ends the text, is delivered, and cannot be sampled before min_tokens."""
    prompt = prompt_of(10, 0)
    plain = greedy(tiny_llama, prompt, 12)
    stop = plain[4]
    first = plain.index(stop)
    outcome = run(core, request_of("a", prompt, stop_token_ids=(stop,)))["a"]
    assert outcome.tokens[0] == plain[: first + 1]
    assert outcome.finished[0].reason == "stop"
    later = run(core, request_of("b", prompt, stop_token_ids=(stop,), min_tokens=8))["b"]
    assert stop not in later.tokens[0][:8]
    assert len(later.tokens[0]) >= 8


def test_the_context_length_ends_a_text(core: EngineCore) -> None:
    """A sequence that fills the context ends with reason length."""
    outcome = run(core, request_of("a", prompt_of(250, 0), max_tokens=100))["a"]
    assert len(outcome.tokens[0]) == 6
    assert outcome.finished[0].reason == "length"


@pytest.mark.parametrize(
    ("kind", "request_"),
    [
        ("context_too_long", request_of("x", prompt_of(256, 0))),
        ("not_found", request_of("x", (1, 2), adapter="nobody")),
        ("invalid_field", request_of("x", (1, 131))),
        ("invalid_field", request_of("x", (1, -1))),
        ("invalid_field", request_of("x", ())),
        ("invalid_field", request_of("x", (1,), logit_bias=((500, 1.0),))),
    ],
)
def test_impossible_requests_fail_with_their_kind(core: EngineCore, kind: str, request_: Any) -> None:
    """An impossible request fails at once with its kind of error, and the request beside it runs."""
    outcomes = run(core, request_, request_of("good", prompt_of(5, 0)))
    failed = outcomes["x"].failed
    assert failed is not None
    assert failed.kind == kind
    assert len(outcomes["good"].tokens[0]) == 12


def test_abort_at_any_point_frees_everything(core: EngineCore) -> None:
    """A request aborted before, during or after its prompt ends once and its memory is freed."""
    for steps in range(8):
        outcomes = {name: Outcome() for name in ("a", "b")}
        core.add(request_of("a", prompt_of(40, 0), n=2))
        core.add(request_of("b", prompt_of(12, 1)))
        take(core, outcomes, max_steps=steps)
        core.abort("a")
        take(core, outcomes)
        assert {f.reason for f in outcomes["a"].finished.values()} <= {"abort", "length"}
        assert len(outcomes["a"].finished) == 2
        assert len(outcomes["b"].tokens[0]) == 12
    core.abort("nobody")


def test_one_choice_can_end_early(core: EngineCore) -> None:
    """Ending one sequence leaves the others running."""
    outcomes = {"a": Outcome()}
    core.add(request_of("a", prompt_of(6, 0), prompt_of(7, 1)))
    take(core, outcomes, max_steps=3)
    core.finish("a", 0)
    core.finish("a", 0)
    take(core, outcomes)
    assert outcomes["a"].finished[0].reason == "abort"
    assert outcomes["a"].finished[1].reason == "length"


def test_a_deadline_ends_a_request(core: EngineCore) -> None:
    """A request past its deadline finishes with that reason, running or waiting."""
    outcomes = {"a": Outcome(), "b": Outcome()}
    core.add(request_of("a", prompt_of(6, 0), max_tokens=200, deadline=time.monotonic() + 0.05))
    core.add(request_of("b", prompt_of(6, 0), deadline=time.monotonic() - 1))
    take(core, outcomes)
    assert outcomes["b"].finished[0].reason == "deadline"
    assert outcomes["a"].finished[0].reason in ("deadline", "length")


@pytest.mark.parametrize("step", [7200.0, -7200.0])
def test_a_clock_that_is_set_ends_nothing(core: EngineCore, monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    """A wall clock that jumps by two hours either way between two steps affects no time limit."""
    outcomes = {"a": Outcome(), "b": Outcome()}
    core.add(request_of("a", prompt_of(6, 0), max_tokens=20, deadline=time.monotonic() + 3600))
    take(core, outcomes, max_steps=1)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step)
    core.add(request_of("b", prompt_of(6, 0), deadline=time.monotonic() - 1))
    take(core, outcomes)
    assert outcomes["a"].finished[0].reason == "length"
    assert outcomes["b"].finished[0].reason == "deadline"


def test_one_failing_request_harms_no_other(
    core: EngineCore, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When a forward raises because of one sequence, that request fails and the others keep their tokens."""
    step = core.parts.runner.step_forward
    forward = step.forward
    good = prompt_of(12, 0)
    expected = greedy(tiny_llama, good, 4)
    poison = next(t for t in range(3, 131) if t not in (*good, *expected))

    def poisoned(given: StepInput) -> Any:
        if (given.ids == poison).any():
            raise RuntimeError("poisoned")
        return forward(given)

    monkeypatch.setattr(step, "forward", poisoned)
    outcomes = run(core, request_of("bad", (5, poison, 6)), request_of("good", good, max_tokens=4))
    assert outcomes["bad"].failed is not None
    assert outcomes["bad"].failed.kind == "internal"
    assert outcomes["good"].tokens[0] == expected


def test_a_failing_sampler_fails_one_request(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the sampler fails only its own request, and nothing is left without an end."""
    from mlflow_llm.serving.engine.sampling import device_sampler as module

    original = module.sample

    def failing(logits: Any, sequences: Any) -> Any:
        if any(s.request.request_id == "bad" for s in sequences):
            raise RuntimeError("sampler")
        return original(logits, sequences)

    monkeypatch.setattr(module, "sample", failing)
    outcomes = run(core, request_of("bad", (5, 6)), request_of("good", prompt_of(9, 0)))
    assert outcomes["bad"].failed is not None
    assert len(outcomes["good"].tokens[0]) == 12


def test_choices_that_are_not_finite_fail_their_request_once(
    core: EngineCore, caplog: pytest.LogCaptureFixture
) -> None:
    """Two choices with the same broken logits in one step give one ``Failed``, and nothing is left."""
    head = core.parts.runner.step_forward.forward

    def broken(*arguments: Any) -> Any:
        return torch.full_like(head(*arguments), float("nan"))

    core.parts.runner.step_forward.forward = broken
    outcomes = run(core, request_of("a", prompt_of(1, 0), n=2))
    assert outcomes["a"].failed is not None
    assert "not finite" in outcomes["a"].failed.message
    assert core.health().num_running == core.health().num_waiting == 0
    assert "a step of" not in caplog.text  # the step itself did not fail


def test_numbers_that_are_not_finite_fail_one_request(core: EngineCore, tiny_llama: Any) -> None:
    """NaN logits fail their request alone, and the next one in that memory is not touched by them."""
    if isinstance(core.parts.runner.step_forward, ModelForward):
        embedding = core.parts.runner.step_forward.model.get_input_embeddings().weight
    else:
        embedding = core.parts.runner.step_forward.weights.embedding
    with torch.inference_mode():
        embedding[77] = float("nan")
    outcomes = run(core, request_of("bad", (5, 77, 6)), request_of("good", (9, 8, 7), max_tokens=3))
    assert outcomes["bad"].failed is not None
    prompt = (9, 10, 11, 12)
    later = run(core, request_of("later", prompt, max_tokens=5), request_of("too", (4, 5), max_tokens=5))
    assert later["later"].tokens[0] == greedy(tiny_llama, prompt, 5)


def test_logprobs(core: EngineCore, tiny_llama: Any) -> None:
    """Log probabilities are the model's own, of sampled tokens and of the prompt."""
    prompt = prompt_of(40, 0)
    outcome = run(core, request_of("a", prompt, logprobs=3, prompt_logprobs=2, max_tokens=4))["a"]
    ids = list(prompt) + outcome.tokens[0]
    with torch.inference_mode():
        expected = torch.log_softmax(tiny_llama(torch.tensor([ids])).logits[0], -1)
    scored = outcome.scored[0].logprobs
    assert [s.token_id for s in scored] == list(prompt[1:])
    for place, score in enumerate([*scored, *outcome.logprobs[0]]):
        assert score.logprob == pytest.approx(float(expected[place, score.token_id]), abs=1e-4)
        best = expected[place].topk(len(score.top))
        assert [t for t, _ in score.top] == best.indices.tolist()
        assert [p for _, p in score.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_random_traffic_keeps_every_token_and_all_memory(tiny_bundle: Bundle) -> None:
    """With many adds, aborts and early ends in little memory every request ends once and the accounts stay right."""
    draw = random.Random(5)
    core = EngineCore(tiny_bundle, settings(kv_cache_memory=150 * TOKEN_BYTES, max_num_seqs=6))
    outcomes: dict[str, Outcome] = {}
    for i in range(120):
        name = f"r{i}"
        outcomes[name] = Outcome()
        prompt = prompt_of(draw.randint(1, 60), draw.randint(0, 6))
        kind = {"temperature": draw.choice([0.0, 1.0]), "priority": draw.randint(0, 2), "n": draw.randint(1, 3)}
        core.add(request_of(name, prompt, max_tokens=draw.randint(1, 25), seed=i, **kind))
        take(core, outcomes, max_steps=draw.randint(0, 3))
        if draw.random() < 0.3:
            core.abort(f"r{draw.randint(0, i)}")
        if draw.random() < 0.2:
            core.finish(f"r{draw.randint(0, i)}", 0)
    take(core, outcomes)
    assert all(o.failed is None and o.finished for o in outcomes.values())
    assert core.health().num_running == core.health().num_waiting == 0
    assert 0 < core.health().kv_tokens_used <= 150
    core.close()


def test_shutdown_ends_every_request(tiny_bundle: Bundle) -> None:
    """Closing fails running and waiting requests with shutting_down, once each; later requests fail too."""
    core = EngineCore(tiny_bundle, settings(max_num_seqs=1))
    for name in "abc":
        core.add(request_of(name, prompt_of(5, 0), max_tokens=100))
    core.step()
    reported = [(request_id, event.kind) for _, request_id, event in core.close() if not isinstance(event, Tokens)]
    assert sorted(reported) == [(name, "shutting_down") for name in "abc"]
    core.add(request_of("late", (1, 2)))
    assert [event.kind for _, _, event in core.step()] == ["shutting_down"]


def test_an_engine_on_a_thread_of_this_process(tiny_bundle: Bundle, tiny_llama: Any) -> None:
    """The engine on a thread streams to several callers, aborts on close and ends with its streams failed."""
    engine = InProcessEngine(tiny_bundle, settings())
    assert isinstance(engine, Engine)
    prompts = [prompt_of(8 + i, i) for i in range(3)]
    streams = [engine.submit(request_of(str(i), p)) for i, p in enumerate(prompts)]
    for prompt, stream in zip(prompts, streams, strict=True):
        tokens = [t for event in stream if isinstance(event, Tokens) for t in event.token_ids]
        assert tokens == greedy(tiny_llama, prompt, 12)
    left = engine.submit(request_of("left", prompts[0], max_tokens=200))
    next(iter(left))
    left.close()
    left.close()
    engine.check_integrity()
    early = engine.submit(request_of("early", prompts[0], max_tokens=200))
    next(iter(early))
    early.finish(0)
    assert [e.reason for e in early if isinstance(e, Finished)] == ["abort"]
    last = engine.submit(request_of("last", prompts[0], max_tokens=240))
    engine.close()
    engine.close()
    assert list(last)[-1].kind == "shutting_down"  # type: ignore[union-attr]
    assert engine.health().status == "dead"


def test_refused_address_space_falls_back_to_the_budget(
    tiny_bundle: Bundle, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When no more address space than the KV budget may be mapped, the engine has fewer slots and gives the same
    tokens."""
    allowed = 600 * TOKEN_BYTES

    maximum = [allowed + (1 << 16)]  # slots are rounded up to whole pages

    def limited(file: int, length: int, **more: Any) -> Any:
        if length > maximum[0]:
            raise OSError(12, "Cannot allocate memory")
        return real(file, length, **more)

    real = slab.mmap.mmap
    monkeypatch.setattr(slab.mmap, "mmap", limited)
    core = EngineCore(tiny_bundle, settings(kv_cache_memory=allowed))
    assert len(core.parts.cache.table.slots) == 2
    prompts = [prompt_of(20, i) for i in range(4)]
    outcomes = run(core, *(request_of(str(i), p) for i, p in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        assert outcomes[str(i)].tokens[0] == greedy(tiny_llama, prompt, 12)
    core.close()
    maximum[0] = allowed // 2  # enough for the self-test, but not for the cache
    with pytest.raises(PackagingError, match="kv_cache_memory"):
        EngineCore(tiny_bundle, settings(kv_cache_memory=allowed))


def test_a_full_queue_of_others_keeps_no_provisioned_request_out(tiny_bundle: Bundle) -> None:
    """Only best-effort requests are refused beyond ``max_queued_requests``; provisioned ones are counted separately."""
    core = EngineCore(tiny_bundle, settings(max_queued_requests=2))
    requests = [request_of(name, prompt_of(5, i), provisioned=name in "rst") for i, name in enumerate("abcrst")]
    outcomes = run(core, *requests)
    assert {name for name, outcome in outcomes.items() if outcome.failed} == {"c", "t"}
    assert outcomes["c"].failed.kind == outcomes["t"].failed.kind == "overloaded"
    core.close()


def test_a_full_queue_keeps_no_continuation_out(tiny_bundle: Bundle, tiny_llama: Any) -> None:
    """Continuations are taken beyond ``max_queued_requests``, and count towards it for new requests."""
    core = EngineCore(tiny_bundle, settings(max_queued_requests=2))
    prompts = {name: prompt_of(5, i) for i, name in enumerate("abcde")}
    outcomes = {name: Outcome() for name in prompts}
    for name, prompt in prompts.items():
        core.add(request_of(name, prompt), continues=name in "cd")
    take(core, outcomes)
    assert [name for name, outcome in outcomes.items() if outcome.failed] == ["e"]
    for name in "abcd":
        assert outcomes[name].tokens[0] == greedy(tiny_llama, prompts[name], 12)
    core.close()


def test_a_flood_changes_no_provisioned_token(core: EngineCore, tiny_llama: Any) -> None:
    """Provisioned requests preempt best-effort ones amid their text, and both have the tokens they have alone."""
    flood = {f"f{i}": prompt_of(6 + i, i) for i in range(6)}
    outcomes = {name: Outcome() for name in (*flood, "r0", "r1", "r2")}
    for name, prompt in flood.items():
        core.add(request_of(name, prompt, max_tokens=20))
    take(core, outcomes, max_steps=8)
    provisioned = {f"r{i}": prompt_of(9, 20 + i) for i in range(3)}
    for name, prompt in provisioned.items():
        core.add(request_of(name, prompt, max_tokens=10, provisioned=True))
    take(core, outcomes)
    assert core.parts.scheduler.num_preemptions >= 3
    for name, prompt in (flood | provisioned).items():
        assert outcomes[name].tokens[0] == greedy(tiny_llama, prompt, 10 if name in provisioned else 20)
    assert core.health().provisioned_tokens == 30
