"""Diverse beam searches in the engine: processors as in transformers 4.55, and early texts in streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beam_runs import STOPPING_OF, check, make_core, texts
from engine_runs import Outcome, run, take
from group_beam_cases import bias_of
from group_beam_cases import model as group_model
from tiny_models import VOCAB, prompt_of, request_of, save_bundle

from mlflow_llm.serving.engine.beams import beam_group
from mlflow_llm.serving.engine.beams.beam_search import Hypothesis
from mlflow_llm.serving.engine.beams.group_beam_search import GroupBeamSearch
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.request import Beams, ValidRequest

CASES = Path(__file__).parent / "group_processor_cases.json"


def request_for(case: dict[str, Any], name: str) -> ValidRequest:
    seed = case["bias_seed"]
    return request_of(
        name,
        case["prompt"],
        n=case["n"],
        max_tokens=case["max_tokens"],
        min_tokens=case["min_tokens"],
        repetition_penalty=case["repetition_penalty"],
        no_repeat_ngram_size=case["no_repeat_ngram_size"],
        bad_words=tuple(map(tuple, case["bad_words"])),
        embedding_bias=None if seed is None else bias_of(seed).tobytes(),
        stop_token_ids=tuple(case["ends"]),
        beams=Beams(
            width=case["width"],
            num_groups=case["num_groups"],
            diversity_penalty=case["diversity_penalty"],
            length_penalty=case["length_penalty"],
            early_stopping=STOPPING_OF[case["early_stopping"]],
        ),
    )


def test_processors_within_groups_are_those_of_the_last_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 searches with bad words, n-grams, penalties, biases, min_tokens and stop tokens have the texts and scores of
    transformers 4.55, many at once: a repetition penalty also multiplies the diversity penalty."""
    made: dict[tuple[int, ...], Any] = {}
    make_search = beam_group.make_search
    monkeypatch.setattr(beam_group, "make_search", lambda *a: made.setdefault(len(made), make_search(*a)))  # type: ignore[arg-type]
    core = make_core(save_bundle(group_model(), tmp_path), max_num_seqs=32)
    cases = json.loads(CASES.read_text())
    outcomes = run(core, *(request_for(case, f"case-{i}") for i, case in enumerate(cases)))
    for i, case in enumerate(cases):
        found: list[Hypothesis] = made[i].best(case["n"])  # type: ignore[index]
        check(found, case["texts"], case["scores"], case["ends"], case["ends"][0])
        assert texts(outcomes[f"case-{i}"]) == [list(one.token_ids) for one in found]
    core.close()


def streamed(core: Any, request: ValidRequest) -> tuple[Outcome, int]:
    """Return a request's outcome, and the number of steps after which some but not all of its texts were sent."""
    outcomes = {request.request_id: Outcome()}
    found = outcomes[request.request_id]
    core.add(request)
    early = 0
    while len(found.finished) < request.n:
        take(core, outcomes, max_steps=1)
        early += 0 < len(found.finished) < request.n
    take(core, outcomes)
    return found, early


RISING = np.full(VOCAB, 0.1, dtype="<f4").tobytes()


@pytest.mark.parametrize("early_stopping", ["heuristic", "first", "never"])
@pytest.mark.parametrize(
    ("more", "comes_early"),
    [
        ({}, True),
        ({"logit_bias": ((7, -100.0),), "repetition_penalty": 1.2, "presence_penalty": 0.1}, True),
        ({"logit_bias": ((7, 0.5),)}, False),
        ({"embedding_bias": RISING}, False),
        ({"presence_penalty": -0.1}, False),
    ],
)
def test_a_streamed_search_in_groups_sends_what_is_certain(
    tiny_bundle: Bundle, tiny_llama: Any, early_stopping: Any, more: dict[str, Any], comes_early: bool
) -> None:
    """A text that no running group can outrank is sent at once; with a bias or penalty that may raise log probabilities
    nothing is sent before the end. The texts equal those that come together."""
    core = make_core(tiny_bundle)
    early = 0
    for number in range(8):
        prompt, penalty = prompt_of(9, number), [-0.5, 0.0, 1.0][number % 3]
        with torch.inference_mode():
            likely = tiny_llama(torch.tensor([prompt])).logits[0, -1].topk(20).indices
        ends = tuple(likely[[number % 4, 7, 15]].tolist())
        beams = Beams(
            width=4, num_groups=2, diversity_penalty=0.5, length_penalty=penalty, early_stopping=early_stopping
        )
        asked: dict[str, Any] = {"max_tokens": 12, "n": 3, "stop_token_ids": ends, "beams": beams, **more}
        wanted = run(core, request_of("a", prompt, **asked))["a"]
        found, times = streamed(core, request_of("a", prompt, stream=True, **asked))
        assert texts(found) == texts(wanted)
        assert {i: f.reason for i, f in found.finished.items()} == {i: f.reason for i, f in wanted.finished.items()}
        early += times
    assert bool(early) == comes_early
    core.close()


def test_texts_of_a_finished_group_wait_for_the_others() -> None:
    """A finished group changes no more, but its texts are sent only when no other group may find a better one: then all
    at once."""
    search = GroupBeamSearch(2, 9, (1,), 1.0, "first", num_groups=2, diversity_penalty=0.0, filler=0)
    row = torch.full((1, 6), -9.0)
    row[0, [1, 2]] = torch.tensor([-2.0, -1.0])
    search.step(row)  # both groups: 2 goes on
    rows = torch.full((2, 6), -9.0)
    rows[0, 1] = rows[1, 3] = -0.5
    search.step(rows)  # the first group ends with -1.5 / 2, the second goes on with -1.5, of 9 tokens at most
    assert search.num_certain == 0
    rows = torch.full((2, 6), -9.0)
    rows[1, 3] = -6.0
    search.step(rows)  # -7.5 / 9 is less
    assert not search.done
    assert search.num_certain == 1
    assert [one.token_ids for one in search.best(1)] == [(2, 1)]
