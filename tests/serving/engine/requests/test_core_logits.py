"""Logits of prompts and generated tokens: the model's own rows, each once and in order, within a memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_runs import Outcome, run, take
from grammar_runs import bundle_of
from tiny_models import VOCAB, prompt_of, request_of

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.in_process import InProcessEngine
from mlflow_llm.serving.engine.scheduling import inflight
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.request import Beams, RawCompletion, RawSampling, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.tasks.prepare import prepare
from mlflow_llm.serving.tasks.prompt.endpoint import EndpointView
from mlflow_llm.serving.tasks.prompt.text import TextModel
from mlflow_llm.serving.tasks.reply import generate

TOKEN_BYTES = 2 * 2 * 8 * 2 * 4  # layers, K and V heads, head width, K and V, float32
BOTH = {"context_logits": True, "generation_logits": True}


def core_of(bundle: Bundle, **more: Any) -> EngineCore:
    basic: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "kv_cache_memory": 1 << 24}
    return EngineCore(bundle, EngineSettings(**{**basic, **more}))


@pytest.fixture
def core(tiny_bundle: Bundle) -> Iterator[EngineCore]:
    core = core_of(tiny_bundle)
    yield core
    core.check_integrity()
    core.close()


@torch.inference_mode()
def rows_of(model: Any, tokens: Sequence[int]) -> Any:
    return model(torch.tensor([list(tokens)])).logits[0].numpy()


def assert_rows(model: Any, prompt: Sequence[int], outcome: Outcome, index: int = 0, *, context: bool = True) -> None:
    """Check that the outcome's rows are the model's own for the prompt and the text of sequence ``index``."""
    assert outcome.failed is None, outcome.failed
    tokens = outcome.tokens[index]
    expected = rows_of(model, (*prompt, *tokens))
    generated = outcome.logits("generation", index)
    assert len(generated) == len(tokens)
    np.testing.assert_allclose(generated, expected[len(prompt) - 1 : -1], atol=1e-4)
    if context:
        np.testing.assert_allclose(outcome.logits("context", index), expected[: len(prompt)], atol=1e-4)


@pytest.mark.parametrize("length", [1, 16, 17, 40])
def test_rows_are_the_models(core: EngineCore, tiny_llama: Any, length: int) -> None:
    """There is a row for each token of the prompt and each generated one, however the prompt falls into chunks."""
    prompt = prompt_of(length, 0)
    busy = request_of("busy", prompt_of(9, 7), max_tokens=10)
    outcomes = run(core, request_of("a", prompt, max_tokens=7, **BOTH), busy)
    assert_rows(tiny_llama, prompt, outcomes["a"])
    assert not outcomes["busy"].rows


def test_rows_are_those_before_any_logits_processor(core: EngineCore, tiny_llama: Any) -> None:
    """Rows include neither bias, penalties, temperature nor min_tokens."""
    prompt = prompt_of(12, 1)
    asked = request_of(
        "a", prompt, max_tokens=6, temperature=0.7, top_k=5, seed=3, repetition_penalty=1.5, presence_penalty=1.0,
        logit_bias=((4, 30.0),), min_tokens=4, stop_token_ids=(4,), **BOTH,
    )  # fmt: skip
    outcome = run(core, asked)["a"]
    assert outcome.tokens[0][4:] == [4]
    assert_rows(tiny_llama, prompt, outcome)


def test_rows_come_in_events_of_a_bounded_size(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows of one step are sent as several events."""
    monkeypatch.setattr(inflight, "LOGITS_EVENT_BYTES", 3 * 4 * VOCAB)
    outcome = run(core, request_of("a", prompt_of(16, 1), max_tokens=1, **BOTH))["a"]
    assert [event.num_rows for event in outcome.rows["context", 0]] == [3, 3, 3, 3, 3, 1]
    assert len(outcome.logits("context")) == 16


def test_a_warm_prefix_returns_all_rows(core: EngineCore) -> None:
    """A prompt with cached KV returns all its context logits, bitwise the same."""
    prompt = prompt_of(40, 2)
    first = run(core, request_of("a", prompt, max_tokens=3, **BOTH))["a"]
    run(core, request_of("b", (*prompt, 5, 6), max_tokens=3))
    again = run(core, request_of("c", prompt, max_tokens=3, **BOTH))["c"]
    assert again.finished[0].num_cached_tokens == 0
    for of in ("context", "generation"):
        assert np.array_equal(first.logits(of), again.logits(of))
    plain = run(core, request_of("d", prompt, max_tokens=3, generation_logits=True))["d"]
    assert plain.finished[0].num_cached_tokens > 0


def test_rows_that_were_delivered_are_not_computed_again(core: EngineCore, tiny_llama: Any) -> None:
    """A request resumed after some rows takes the earlier ones from the prefix cache."""
    prompt = prompt_of(40, 2)
    whole = run(core, request_of("a", prompt, max_tokens=3, **BOTH))["a"]
    asked = request_of("b", prompt, max_tokens=3, **BOTH)
    asked = msgspec.structs.replace(
        asked, sequences=(msgspec.structs.replace(asked.sequences[0], context_logits_from=25),)
    )
    rest = run(core, asked)["b"]
    assert rest.finished[0].num_cached_tokens == 25
    np.testing.assert_allclose(rest.logits("context", first=25), whole.logits("context")[25:], atol=1e-4)


def test_a_prompt_alone(core: EngineCore, tiny_llama: Any) -> None:
    """A request with max_tokens 0 and context logits, alone or with prompt scores, ends with them."""
    prompt = prompt_of(20, 4)
    asked = [
        request_of("a", prompt, max_tokens=0, context_logits=True),
        request_of("b", prompt, max_tokens=0, context_logits=True, logprobs=0, prompt_logprobs=0),
    ]
    outcomes = run(core, *asked)
    for name in "ab":
        assert_rows(tiny_llama, (*prompt,), outcomes[name])
        assert outcomes[name].finished[0].reason == "length"
    assert len(outcomes["b"].scored[0].logprobs) == 19


def test_each_row_once_through_preemption(tiny_bundle: Bundle, tiny_llama: Any) -> None:
    """Sequences preempted in their prompt or after it give every row once."""
    core = core_of(tiny_bundle, kv_cache_memory=150 * TOKEN_BYTES, max_num_batched_tokens=8)
    prompts = [prompt_of(30, i) for i in range(4)]
    outcomes = run(core, *(request_of(str(i), p, max_tokens=30, **BOTH) for i, p in enumerate(prompts)))
    assert core.parts.scheduler.num_preemptions
    for i, prompt in enumerate(prompts):
        assert_rows(tiny_llama, prompt, outcomes[str(i)])
    core.close()


def test_each_row_once_through_a_failed_step(core: EngineCore, tiny_llama: Any, monkeypatch: Any) -> None:
    """Rows sent before a step failed are not sent again when it is rerun."""
    from mlflow_llm.serving.engine.sampling import device_sampler as module

    original, calls = module.sample, []

    def fails_once(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("a fault")
        return original(*args)

    monkeypatch.setattr(module, "sample", fails_once)
    prompts = [prompt_of(6, 1), prompt_of(5, 2)]
    outcomes = run(core, *(request_of(str(i), p, max_tokens=4, **BOTH) for i, p in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        assert_rows(tiny_llama, prompt, outcomes[str(i)])


@pytest.mark.parametrize("groups", [1, 2])
def test_beams(core: EngineCore, tiny_llama: Any, groups: int) -> None:
    """Each text of a search has the rows of its own tokens, with log probabilities; the context comes once."""
    prompt = prompt_of(12, 3)
    beams = Beams(width=4, num_groups=groups, diversity_penalty=0.5 if groups > 1 else 0.0)
    asked = request_of("a", prompt, n=3, max_tokens=6, beams=beams, logprobs=0, repetition_penalty=1.3, **BOTH)
    outcome = run(core, asked)["a"]
    for index in range(3):
        assert_rows(tiny_llama, prompt, outcome, index, context=index == 0)
        own = torch.log_softmax(torch.from_numpy(outcome.logits("generation", index)), -1)
        scores = own.gather(1, torch.tensor(outcome.tokens[index])[:, None])[:, 0].tolist()
        assert [one.logprob for one in outcome.logprobs[index]] == pytest.approx(scores, abs=1e-5)
    assert {of for of, index in outcome.rows if index} == {"generation"}


def test_numbers_that_are_not_finite(tiny_bundle: Bundle) -> None:
    """A context that is not finite fails its request, also if nothing is generated."""
    core = core_of(tiny_bundle)
    forward = core.parts.runner.step_forward.forward
    core.parts.runner.step_forward.forward = lambda *args: forward(*args) * float("nan")  # type: ignore[method-assign]
    failed = run(core, request_of("a", prompt_of(9, 0), max_tokens=0, context_logits=True))["a"].failed
    assert failed is not None
    assert failed.kind == "internal"
    core.close()


@pytest.mark.parametrize(
    ("more", "field", "size"),
    [
        ({"context_logits": True, "max_tokens": 1}, "context_logits", 21 * 4 * VOCAB),
        ({"generation_logits": True, "max_tokens": 11, "n": 2}, "generation_logits", 22 * 4 * VOCAB),
        ({"generation_logits": True, "max_tokens": 6, "beams": Beams(width=4)}, "generation_logits", 24 * 4 * VOCAB),
        ({**BOTH, "max_tokens": 1}, "context_logits", 22 * 4 * VOCAB),
    ],
)
def test_more_than_the_setting_is_refused(tiny_bundle: Bundle, more: Any, field: str, size: int) -> None:
    """A request over the limit is refused before it runs, with its bytes and the limit."""
    core = core_of(tiny_bundle, max_logits_bytes=20 * 4 * VOCAB)
    outcomes = run(core, request_of("a", prompt_of(21, 0), **more), request_of("b", prompt_of(4, 0), max_tokens=2))
    failed = outcomes["a"].failed
    assert failed is not None
    assert failed.param == field
    assert f"{size} bytes" in failed.message
    assert f"at most {20 * 4 * VOCAB} bytes" in failed.message
    assert "max_logits_bytes" in failed.message
    assert outcomes["b"].failed is None
    core.close()


def test_a_request_at_the_limit_runs(tiny_bundle: Bundle) -> None:
    """A request exactly at the limit runs."""
    core = core_of(tiny_bundle, max_logits_bytes=20 * 4 * VOCAB)
    outcome = run(core, request_of("a", prompt_of(15, 0), max_tokens=5, **BOTH))["a"]
    assert len(outcome.logits("context")) == 15
    assert len(outcome.logits("generation")) == 5
    core.close()


def test_an_aborted_request(core: EngineCore) -> None:
    """A request aborted in the middle of its prompt has the rows up to there."""
    asked: ValidRequest = request_of("a", prompt_of(60, 0), max_tokens=4, **BOTH)
    core.add(asked)
    outcomes = take(core, {"a": Outcome()}, max_steps=2)
    core.abort("a")
    take(core, outcomes)
    assert outcomes["a"].finished[0].reason == "abort"
    assert len(outcomes["a"].logits("context")) == 32


def test_a_reply_contains_the_rows(tmp_path: Path) -> None:
    """Replies of a dialect contain the rows of each choice's tokens, and each token's own log probability, whose sum is
    the choice's."""
    bundle = bundle_of("byte_level", tmp_path)
    engine = InProcessEngine(bundle, EngineSettings(kv_cache_memory=1 << 24, batch_invariant=True))
    view = EndpointView(name="tiny", info=engine.info, text=TextModel(bundle))
    sampling = RawSampling(max_tokens=5, n=2, temperature=1.0, seed=1, logprobs=True, ignore_eos=True, **BOTH)
    request = prepare(RawCompletion(prompts=("hello world",), sampling=sampling), view)
    reply = generate.gather(generate.run(engine, request, view.text))
    engine.close()
    size, length = engine.info.vocab_size, request.num_prompt_tokens
    first, second = reply.choices
    assert len(first.context_logits) == 4 * size * length
    assert second.context_logits == b""
    for choice in reply.choices:
        rows = np.frombuffer(choice.generation_logits, dtype="<f4").reshape(5, size)
        own = torch.log_softmax(torch.from_numpy(rows.copy()), -1)[torch.arange(5), torch.tensor(choice.token_ids)]
        assert list(choice.token_logprobs) == pytest.approx(own.tolist(), abs=1e-5)
        assert choice.cum_logprob == pytest.approx(float(own.sum()), abs=1e-4)
        assert np.array_equal(rows[0], np.frombuffer(first.context_logits, dtype="<f4").reshape(length, size)[-1])
