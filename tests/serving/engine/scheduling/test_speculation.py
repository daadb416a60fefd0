"""Speculation: texts, log probabilities and ends are those of one token a step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_runs import Outcome, run, take
from tiny_models import FAMILIES, VOCAB, make_model, request_of, save_bundle

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.native import library
from mlflow_llm.serving.engine.scheduling.prompt_lookup import Prediction, lookup
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.request import Beams, DraftTokens, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings

pytestmark = pytest.mark.skipif(library.library() is None, reason="speculation is the native step's")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return save_bundle(make_model(FAMILIES["llama_wide"]()), tmp_path_factory.mktemp("wide"))


def make_core(bundle: Bundle, speculation: Any = "auto", **more: Any) -> EngineCore:
    settings = {"max_num_seqs": 12, "max_num_batched_tokens": 32, "kv_cache_memory": 1 << 24, **more}
    return EngineCore(bundle, EngineSettings(speculation=speculation, **settings))


@pytest.fixture(params=["none", "int8"])
def cores(bundle: Bundle, request: pytest.FixtureRequest) -> Iterator[tuple[EngineCore, EngineCore]]:
    """Return a core with drafts and one without."""
    pair = make_core(bundle, quantization=request.param), make_core(bundle, "none", quantization=request.param)
    yield pair
    for core in pair:
        core.check_integrity()
        core.close()


def repetitive(rng: random.Random, number: int, **more: Any) -> ValidRequest:
    """Return a prompt of a few repeated words, as in an edit of a text, with every kind of sampling."""
    words = [[rng.randint(3, VOCAB - 1) for _ in range(rng.randint(2, 5))] for _ in range(3)]
    prompt = [token for _ in range(rng.randint(4, 10)) for token in rng.choice(words)]
    fields: dict[str, Any] = {
        "max_tokens": rng.randint(1, 40),
        "temperature": rng.choice([0.0, 0.0, 0.4, 1.0]),
        "top_p": rng.choice([1.0, 0.9]),
        "top_k": rng.choice([0, 5]),
        "repetition_penalty": rng.choice([1.0, 1.0, 0.6]),
        "presence_penalty": rng.choice([0.0, -1.5]),
        "logit_bias": tuple((token, rng.choice([0.0, 3.0, 40.0])) for token in words[0]),
        "logprobs": rng.choice([None, 0, 2]),
        "min_tokens": rng.choice([0, 5]),
        "stop_token_ids": rng.choice([(), (7, 11, 13)]),
        "seed": number,
    }
    if rng.random() < 0.25:  # settings that may forbid drafted tokens, or end the text at them
        word = rng.choice(words)
        bias = np.random.default_rng(number).normal(size=VOCAB).astype("<f4").tobytes()
        fields |= rng.choice(
            [
                {"bad_words": (tuple(word), (3,))},
                {"no_repeat_ngram_size": 6},
                {"stop_sequences": (tuple(word), (4, 4))},
                {"embedding_bias": bias, "penalize_prompt": True},
            ]
        )
    fields["min_tokens"] = min(fields["min_tokens"], fields["max_tokens"])
    return request_of(f"r{number}", prompt, **fields | more)


def same(found: Outcome, wanted: Outcome) -> None:
    assert found.failed is None, found.failed
    assert found.tokens == wanted.tokens
    assert found.logprobs == wanted.logprobs  # to the last bit
    ends = [{i: (f.reason, f.num_generated_tokens) for i, f in one.finished.items()} for one in (found, wanted)]
    assert ends[0] == ends[1]


def test_drafts_change_no_text(cores: tuple[EngineCore, EngineCore]) -> None:
    """300 requests, one to six at a time, drawn and greedy, with penalties, biases and ends, have the tokens, log
    probabilities and ends that they have without drafts; many drafts are taken, and many are not."""
    drafting, plain = cores
    rng = random.Random(3)
    number = 0
    while number < 300:
        requests = [repetitive(rng, number + i) for i in range(rng.randint(1, 6))]
        number += len(requests)
        found, wanted = run(drafting, *requests), run(plain, *requests)
        for request in requests:
            same(found[request.request_id], wanted[request.request_id])
    speculation = drafting.parts.scheduler.speculation
    assert 200 < speculation.num_taken < speculation.num_proposed - 200
    assert plain.parts.scheduler.speculation is None


def test_drafts_save_steps(cores: tuple[EngineCore, EngineCore]) -> None:
    """A text that repeats itself takes fewer steps than it has tokens."""
    drafting, plain = cores
    bias = tuple((token, 60.0) for token in (20, 21, 22))
    request = request_of("a", [20, 21, 22] * 6, max_tokens=60, logit_bias=bias, repetition_penalty=1.0)
    before = drafting.health().steps
    found = run(drafting, request)["a"]
    assert drafting.health().steps - before < 40
    same(found, run(plain, request)["a"])


def test_drafts_beside_losses_of_memory(bundle: Bundle) -> None:
    """Sequences with drafts that are preempted and resumed have the texts that they have alone."""
    token_bytes = 2 * 2 * 16 * 2 * 4
    tight = make_core(bundle, kv_cache_memory=190 * token_bytes)
    plain = make_core(bundle, "none")
    rng = random.Random(4)
    requests = [repetitive(rng, i, max_tokens=40, min_tokens=0, stop_token_ids=()) for i in range(6)]
    found = run(tight, *requests)
    assert tight.parts.scheduler.num_preemptions > 0
    for request in requests:
        same(found[request.request_id], run(plain, request)[request.request_id])
    tight.close(), plain.close()


def test_a_request_aborted_between_drafted_steps_ends_once(bundle: Bundle) -> None:
    """A request aborted between two steps with drafts ends once, and others are unaffected."""
    core, plain = make_core(bundle), make_core(bundle, "none")
    rng = random.Random(9)
    first, second = (repetitive(rng, i, max_tokens=40, min_tokens=0, stop_token_ids=()) for i in range(2))
    outcomes = {"r0": Outcome(), "r1": Outcome()}
    core.add(first), core.add(second)
    take(core, outcomes, max_steps=6)
    core.abort("r0")
    take(core, outcomes)
    assert outcomes["r0"].finished[0].reason == "abort"
    same(outcomes["r1"], run(plain, second)["r1"])
    core.close(), plain.close()


def test_searches_and_many_sequences_draft_nothing(bundle: Bundle) -> None:
    """Beam searches and batches of eight sequences use no drafts, because steps pay off without."""
    core = make_core(bundle)
    rng = random.Random(2)
    run(core, repetitive(rng, 0, temperature=0.0, logprobs=None, beams=Beams(width=3)))
    assert core.parts.scheduler.speculation.num_proposed == 0
    scheduler, speculate, counts = core.parts.scheduler, core.parts.scheduler.speculate, []

    def counted(*arguments: Any) -> Any:
        counts.append(len(scheduler.running) + len(scheduler.waiting))
        return speculate(*arguments)

    scheduler.speculate = counted
    run(core, *(repetitive(rng, i, max_tokens=8 + i, min_tokens=8) for i in range(9)))
    assert counts
    assert max(counts) < 8
    core.close()


@pytest.mark.parametrize(
    ("tokens", "maximum", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 4, [4, 5, 1, 2]),
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 3, 9, 1, 2, 3, 4, 1, 2, 3], 1, [4]),  # the last place it came
        ([5, 5, 5, 5], 3, [5]),
        ([1, 2, 3], 4, []),
        ([1, 2, 3, 4, 2, 3, 4, 9], 4, []),
        ([1, 2, 3, 4, 1, 2, 3], 0, []),
    ],
)
def test_prompt_lookup(tokens: list[int], maximum: int, drafts: list[int]) -> None:
    """Prompt lookup proposes the tokens after the last earlier occurrence of the last three tokens."""
    assert lookup(np.array(tokens, dtype=np.int32), maximum).tolist() == drafts


def array(tokens: list[int]) -> Any:
    return np.array(tokens, dtype=np.int32)


def test_a_prediction_is_followed_and_taken_up_again() -> None:
    """A prediction is followed from its beginning; after a mismatch nothing is proposed until the last three words, or
    else any, occur in it again."""
    prediction = Prediction([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 9])
    steps = [
        ([], [1, 2, 3]),
        ([1, 2], [3, 4, 5]),
        ([1, 2, 30], []),
        ([1, 2, 30, 4, 5], []),
        ([1, 2, 30, 4, 5, 6], [7, 8, 1]),
        ([1, 2, 30, 4, 5, 6, 7, 8, 1, 2, 3], [9]),
        ([1, 2, 30, 4, 5, 6, 7, 8, 1, 2, 3, 9], []),
        ([1, 2, 30, 4, 5, 6, 7, 8, 1, 2, 3, 9, 2, 3, 4], [5, 6, 7]),
    ]
    for output, drafts in steps:
        prediction.follow(array(output), array([50, 51, *output]))
        assert prediction.next(3).tolist() == drafts
    assert prediction.next(0).tolist() == []


def test_a_predicted_text_takes_fewer_steps(cores: tuple[EngineCore, EngineCore]) -> None:
    """A predicted text takes several tokens a step, also after a mismatch; drafts are counted as the caller's."""
    drafting, plain = cores
    first = run(plain, request_of("a", [5, 6, 7], max_tokens=60, temperature=1.0))["a"]
    expected = list(first.tokens[0])
    expected[20:22] = [3, 4, 5]
    before = drafting.health().steps
    request = request_of("a", [5, 6, 7], max_tokens=60, temperature=1.0, draft=DraftTokens(token_ids=tuple(expected)))
    found = run(drafting, request)["a"]
    assert drafting.health().steps - before < 25
    same(found, first)
    counts = found.finished[0].drafts
    assert counts is not None
    assert found.drafts == {0: counts}  # counts come with the tokens, in case the engine dies before the end
    assert first.drafts == {}
    assert counts.predicted_accepted > 40
    assert counts.predicted - counts.predicted_accepted > 0
    assert run(plain, request)["a"].tokens == first.tokens


@pytest.mark.parametrize("field", ["stop_token_ids", "stop_sequences"])
def test_drafts_after_the_end_are_not_accepted(bundle: Bundle, field: str) -> None:
    """Drafts after the end of a text do not count as accepted, wherever it ends: at most those of its tokens after the
    first do."""
    core = make_core(bundle)
    sampling: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0}
    text = list(run(core, request_of("a", [5, 6, 7], **sampling))["a"].tokens[0])
    ends = [at for at in range(4, 30) if text.index(text[at]) == at]
    assert len(ends) > 10
    accepted = []
    for at in ends:
        stop = (text[at],) if field == "stop_token_ids" else ((text[at - 1], text[at]),)
        draft = DraftTokens(token_ids=tuple(text))
        found = run(core, request_of("a", [5, 6, 7], **sampling, draft=draft, **{field: stop}))["a"]
        assert found.finished[0].num_generated_tokens == at + 1
        counts = found.finished[0].drafts
        assert counts is not None
        assert counts.predicted_accepted <= counts.accepted <= at
        accepted.append(counts.accepted)
    assert max(accepted) > 10
    core.check_integrity()
    core.close()


def test_without_our_kernels_nothing_is_drafted(bundle: Bundle, tmp_path: Path) -> None:
    """Without the native kernels there are no drafts, since logits that depend on the batch could change a text."""
    core = make_core(bundle, kernels="torch")
    assert core.parts.scheduler.speculation is None
    core.close()
