"""Beam searches in the engine: transformers' texts, whatever runs beside them and whatever is preempted."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from beam_runs import EARLY, make_core, texts
from engine_runs import TOKEN_BYTES, Outcome, run, take
from tiny_models import FAMILIES, VOCAB, greedy, make_model, prompt_of, request_of, save_bundle

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.request import Beams, ValidRequest


@torch.inference_mode()
def expected(model: Any, request: ValidRequest) -> list[list[int]]:
    """Return the texts that ``generate(num_beams=…)`` has for the request's one prompt."""
    sampling, prompt = request.sampling, request.sequences[0].prompt_token_ids
    assert sampling is not None
    assert sampling.beams is not None
    ends = list(sampling.stop_token_ids)
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=sampling.beams.width,
        num_return_sequences=request.n,
        length_penalty=sampling.beams.length_penalty,
        early_stopping=EARLY[sampling.beams.early_stopping],
        eos_token_id=ends or None,
        pad_token_id=0,
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens or None,
        repetition_penalty=sampling.repetition_penalty,
        do_sample=False,
    )
    texts: list[list[int]] = out[:, len(prompt) :].tolist()
    for text in texts:
        for place, token in enumerate(text):
            if token in ends and place >= sampling.min_tokens:
                del text[place + 1 :]
                break
    return texts


def random_search(rng: random.Random, number: int, longest: int = 40) -> ValidRequest:
    width = rng.randint(2, 6)
    return request_of(
        f"beams-{number}",
        prompt_of(rng.randint(1, longest), number),
        n=rng.randint(1, width),
        max_tokens=rng.randint(1, 12),
        min_tokens=rng.choice([0, 0, 1]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        stop_token_ids=tuple(rng.sample(range(3, VOCAB), rng.choice([0, 8, 20]))),
        beams=Beams(
            width=width,
            length_penalty=rng.choice([-1.0, 0.0, 1.0, 2.0]),
            early_stopping=rng.choice(["heuristic", "first", "never"]),
        ),
    )


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_searches_alone_and_together(tiny_bundle: Bundle, tiny_llama: Any, prefix_caching: bool) -> None:
    """Twenty random searches have transformers' texts, alone and all at once beside greedy requests, which have their
    own."""
    rng = random.Random(5)
    core = make_core(tiny_bundle, prefix_caching=prefix_caching)
    searches = [random_search(rng, number) for number in range(20)]
    wanted = {request.request_id: expected(tiny_llama, request) for request in searches}
    for request in searches:
        assert texts(run(core, request)[request.request_id]) == wanted[request.request_id]
    plain = [request_of(f"plain-{i}", prompt_of(10 + i, 100 + i), max_tokens=20) for i in range(6)]
    outcomes = run(core, *searches[:10], *plain, *searches[10:])
    for request in searches:
        assert texts(outcomes[request.request_id]) == wanted[request.request_id]
    for request in plain:
        assert outcomes[request.request_id].tokens[0] == greedy(tiny_llama, request.sequences[0].prompt_token_ids, 20)
    assert core.health().kv_tokens_used == 0 or prefix_caching
    core.close()


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mixtral", "gemma2"])
def test_searches_of_other_architectures(family: str, tmp_path: Any) -> None:
    """Searches over other models, sliding windows and experts among them, have transformers' texts."""
    model = make_model(FAMILIES[family]())
    core = make_core(save_bundle(model, tmp_path))
    rng = random.Random(8)
    searches = [random_search(rng, number) for number in range(6)]
    outcomes = run(core, *searches)
    for request in searches:
        assert texts(outcomes[request.request_id]) == expected(model, request)
    core.close()


def test_searches_give_way_and_come_back(tiny_bundle: Bundle, tiny_llama: Any) -> None:
    """With memory for two searches at most, eight of them and plain requests preempt each other whole, and all finish
    with their texts."""
    core = make_core(tiny_bundle, kv_cache_memory=330 * TOKEN_BYTES, max_num_seqs=12)
    searches = [
        request_of(f"s{i}", prompt_of(18, i), max_tokens=20, n=2, beams=Beams(width=4, early_stopping="never"))
        for i in range(8)
    ]
    plain = [request_of(f"p{i}", prompt_of(15, 50 + i), max_tokens=30) for i in range(4)]
    outcomes = run(core, *searches[:4], *plain, *searches[4:])
    assert core.parts.scheduler.num_preemptions > 0
    for request in searches:
        assert texts(outcomes[request.request_id]) == expected(tiny_llama, request)
    for request in plain:
        assert outcomes[request.request_id].tokens[0] == greedy(tiny_llama, request.sequences[0].prompt_token_ids, 30)
    core.close()


def test_a_prompt_is_computed_once(tiny_bundle: Bundle) -> None:
    """A search of eight beams computes its prompt's KV once, with the prefix cache off too."""
    core = make_core(tiny_bundle, prefix_caching=False)
    computed = 0
    forward = core.parts.runner.forward

    def counted(runs: Any) -> Any:
        nonlocal computed
        computed += sum(run.num_tokens for run in runs)
        return forward(runs)

    core.parts.runner.forward = counted  # type: ignore[method-assign]
    run(core, request_of("a", prompt_of(50, 0), max_tokens=5, beams=Beams(width=8)))
    assert computed == 50 + 8 * 4
    core.close()


def test_log_probabilities_are_those_of_the_texts(tiny_bundle: Bundle, tiny_llama: Any) -> None:
    """Each token of a text has its log probability and the best beside it, of the model's own distribution."""
    core = make_core(tiny_bundle)
    request = request_of("a", prompt_of(9, 1), max_tokens=6, n=3, logprobs=2, beams=Beams(width=3))
    outcome = run(core, request)["a"]
    for index in range(3):
        ids = torch.tensor([[*request.sequences[0].prompt_token_ids, *outcome.tokens[index]]])
        with torch.inference_mode():
            scores = torch.log_softmax(tiny_llama(ids).logits[0], -1)
        assert len(outcome.logprobs[index]) == len(outcome.tokens[index])
        for place, entry in enumerate(outcome.logprobs[index]):
            row = scores[8 + place]
            assert entry.token_id == outcome.tokens[index][place]
            assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
            assert [token for token, _ in entry.top] == row.topk(2).indices.tolist()
    core.close()


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_scored_prompt_is_every_texts(tiny_bundle: Bundle, max_tokens: int) -> None:
    """A prompt that is scored, with a search after it or none, has its log probabilities for each of the texts."""
    core = make_core(tiny_bundle)
    more: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": 1, "prompt_logprobs": 1}
    plain = run(core, request_of("a", prompt_of(9, 1), **more))["a"]
    found = run(core, request_of("b", prompt_of(9, 1), n=2, beams=Beams(width=3), **more))["b"]
    assert [found.scored[index].logprobs for index in range(2)] == [plain.scored[0].logprobs] * 2
    assert [found.finished[index].num_generated_tokens for index in range(2)] == [max_tokens] * 2
    core.close()


@pytest.mark.parametrize("penalty", [-0.5, 0.0, 1.0])
def test_a_streamed_search_sends_what_is_certain(tiny_bundle: Bundle, tiny_llama: Any, penalty: float) -> None:
    """A text that can no longer be outranked is sent before the search has ended; the texts stay the same."""
    core = make_core(tiny_bundle)
    early = 0
    for number in range(8):
        prompt = prompt_of(9, number)
        with torch.inference_mode():
            ends = tuple(
                tiny_llama(torch.tensor([prompt])).logits[0, -1].topk(20).indices[[number % 4, 7, 15]].tolist()
            )
        beams = Beams(width=4, length_penalty=penalty, early_stopping="never")
        more: dict[str, Any] = {"max_tokens": 12, "n": 3, "stop_token_ids": ends, "beams": beams}
        wanted = expected(tiny_llama, request_of("a", prompt, **more))
        core.add(request_of("a", prompt, stream=True, **more))
        outcomes = {"a": Outcome()}
        while len(outcomes["a"].finished) < 3:
            take(core, outcomes, max_steps=1)
            early += 0 < len(outcomes["a"].finished) < 3
        assert texts(outcomes["a"]) == wanted
        take(core, outcomes)
    assert early
    core.close()


def test_several_prompts_and_ends_in_between(tiny_bundle: Bundle, tiny_llama: Any) -> None:
    """Each prompt of a request is a search of its own; aborted choices leave the others unchanged."""
    core = make_core(tiny_bundle)
    prompts = [prompt_of(7, 1), prompt_of(11, 2)]
    request = request_of("a", *prompts, max_tokens=8, n=2, beams=Beams(width=4))
    outcomes = {"a": Outcome()}
    core.add(request)
    take(core, outcomes, max_steps=3)
    core.finish("a", 0)
    core.finish("a", 2)
    core.finish("a", 3)
    take(core, outcomes)
    found = outcomes["a"]
    assert {i: f.reason for i, f in found.finished.items()} == {0: "abort", 1: "length", 2: "abort", 3: "abort"}
    alone = request_of("b", prompts[0], max_tokens=8, n=2, beams=Beams(width=4))
    assert found.tokens[1] == expected(tiny_llama, alone)[1]
    assert found.finished[1].num_generated_tokens == 8
    core.close()


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_an_aborted_search_leaves_nothing(tiny_bundle: Bundle, steps: int) -> None:
    """A search that is aborted, before its prompt or in the middle, ends once and frees all it held."""
    core = make_core(tiny_bundle, prefix_caching=False)
    outcomes = {"a": Outcome()}
    core.add(request_of("a", prompt_of(20, 1), max_tokens=30, n=2, beams=Beams(width=4)))
    take(core, outcomes, max_steps=steps)
    core.abort("a")
    take(core, outcomes)
    assert {f.reason for f in outcomes["a"].finished.values()} == {"abort"}
    assert len(outcomes["a"].finished) == 2
    assert core.health().kv_tokens_used == 0
    core.close()


def test_a_deadline_gives_what_is_best_by_then(tiny_bundle: Bundle) -> None:
    """A search past its deadline ends with the best texts it has."""
    core = make_core(tiny_bundle)
    outcomes = {"a": Outcome()}
    request = request_of("a", prompt_of(5, 1), max_tokens=200, n=2, beams=Beams(width=3))
    core.add(request)
    take(core, outcomes, max_steps=6)
    core.inflight.get("a").request = request_of("a", prompt_of(5, 1), deadline=0.0)  # type: ignore[union-attr]
    take(core, outcomes)
    assert {f.reason for f in outcomes["a"].finished.values()} == {"deadline"}
    assert [len(text) for text in texts(outcomes["a"])] == [6, 6]
    core.close()


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"beams": Beams(width=17)}, "beam_width"),
        ({"beams": Beams(width=2), "n": 3}, "beam_width"),
        ({"beams": Beams(width=4, num_groups=3)}, "num_beam_groups"),
        ({"beams": Beams(width=16), "max_tokens": 250}, "beam_width"),
    ],
)
def test_searches_that_could_never_run(tiny_bundle: Bundle, more: dict[str, Any], field: str) -> None:
    """Searches whose beams never fit beside each other are refused by the field's name."""
    core = make_core(tiny_bundle, kv_cache_memory=1000 * TOKEN_BYTES)
    failed = run(core, request_of("a", prompt_of(5, 1), **more))["a"].failed
    assert failed is not None
    assert (failed.kind, failed.param) == ("invalid_field", field)
    core.close()


def test_diverse_searches(tiny_bundle: Bundle) -> None:
    """Groups of beams give different texts; with no penalty the first group is the search of its beams alone."""
    core = make_core(tiny_bundle)
    prompt = prompt_of(9, 3)
    beams = Beams(width=4, num_groups=2, diversity_penalty=3.0)
    found = texts(run(core, request_of("a", prompt, max_tokens=8, n=4, beams=beams))["a"])
    assert len({tuple(text) for text in found}) == 4
    again = texts(run(core, request_of("b", prompt, max_tokens=8, n=4, beams=beams))["b"])
    assert again == found
    core.close()
