"""Beam search as arithmetic: the texts and scores of transformers, for random searches over tiny models."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from beam_runs import STOPPING_OF, check
from group_beam_cases import model as group_model
from tiny_models import FAMILIES, VOCAB, make_model

from mlflow_llm.serving.engine.beams.beam_search import BeamSearch, Hypothesis
from mlflow_llm.serving.engine.beams.group_beam_search import GroupBeamSearch

CASES = Path(__file__).parent / "group_beam_cases.json"


@functools.cache
def tiny(family: str) -> Any:
    return make_model(FAMILIES[family]())


@torch.inference_mode()
def searched(model: Any, prompt: Sequence[int], search: Any, count: int) -> list[Hypothesis]:
    """Return the outcome of a search whose every step computes all tokens again."""
    ids = torch.tensor([list(prompt)])
    rows = ids
    while not search.done:
        forks = search.step(torch.log_softmax(model(rows).logits[:, -1].float(), -1))
        texts = [search.tokens(beam).tolist() for beam in range(len(forks))]
        assert [text[-1] for text in texts] == [fork.token_id for fork in forks]
        rows = torch.cat([ids.expand(len(texts), -1), torch.tensor(texts)], 1) if texts else rows
    found: list[Hypothesis] = search.best(count)
    return found


def random_cases(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Draw searches of widths 2 to 8 with penalties from -1 to 2 and up to three likely end tokens."""
    rng = random.Random(11)
    for _ in range(count):
        family = rng.choice(["llama", "qwen3", "gpt2", "mixtral"])
        width = rng.randint(2, 8)
        prompt = [rng.randint(3, VOCAB - 1) for _ in range(rng.randint(1, 12))]
        with torch.inference_mode():
            likely = tiny(family)(torch.tensor([prompt])).logits[0, -1].topk(40).indices.tolist()
        yield (
            family,
            {
                "width": width,
                "prompt": prompt,
                "length_penalty": rng.choice([-1.0, 0.0, 1.0, 2.0, rng.uniform(-1, 2)]),
                "early_stopping": rng.choice([False, True, "never"]),
                "max_tokens": rng.randint(1, 14),
                "n": rng.randint(1, width),
                "ends": rng.sample(likely, rng.choice([0, 1, 1, 2, 3])),
            },
        )


def test_searches_equal_those_of_transformers() -> None:
    """300 random searches over four architectures have the texts of ``generate(num_beams=…)``, and its scores."""
    for family, case in random_cases(300):
        model, ends = tiny(family), case["ends"]
        ids = torch.tensor([case["prompt"]])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=case["width"],
            num_return_sequences=case["n"],
            length_penalty=case["length_penalty"],
            early_stopping=case["early_stopping"],
            eos_token_id=ends or None,
            pad_token_id=0,
            max_new_tokens=case["max_tokens"],
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        search = BeamSearch(
            case["width"], case["max_tokens"], ends, case["length_penalty"], STOPPING_OF[case["early_stopping"]]
        )
        found = searched(model, case["prompt"], search, case["n"])
        texts = out.sequences[:, len(case["prompt"]) :].tolist()
        check(found, texts, out.sequences_scores.tolist(), ends, ends[0] if ends else 0)


def test_group_searches_equal_those_of_the_last_release_that_had_them() -> None:
    """100 diverse searches have the texts and scores that transformers 4.55 had for the same weights."""
    model = group_model()
    for case in json.loads(CASES.read_text()):
        search = GroupBeamSearch(
            case["width"], case["max_tokens"], case["ends"], case["length_penalty"],
            STOPPING_OF[case["early_stopping"]], num_groups=case["num_groups"],
            diversity_penalty=case["diversity_penalty"], filler=0,
        )  # fmt: skip
        found = searched(model, case["prompt"], search, case["n"])
        check(found, case["texts"], case["scores"], case["ends"], 0)


def searches() -> list[Any]:
    groups: dict[str, Any] = {"num_groups": 2, "diversity_penalty": 0.0, "filler": 0}
    return [BeamSearch(4, 9, (1,), 1.0, "never"), GroupBeamSearch(4, 9, (1,), 1.0, "never", **groups)]


@pytest.mark.parametrize("kind", [0, 1])
def test_a_search_with_few_ways_to_go_on(kind: int) -> None:
    """When nearly all tokens are forbidden, only beams with an allowed token stay alive, and only their texts are
    returned."""
    search = searches()[kind]
    row = torch.full((1, 20), -torch.inf)
    row[0, [3, 4]] = torch.tensor([-1.0, -2.0])
    forks = search.step(row)
    alive = [beam for beam in range(4) if search.is_alive(beam)]
    assert {forks[beam].token_id for beam in alive} == {3, 4}
    assert len(alive) == 2 * (kind + 1)
    rows = torch.full((4, 20), -torch.inf)
    for beam in range(4):
        rows[beam, 1 if forks[beam].token_id == 3 else 5] = -1.0
    search.step(rows)
    rows = torch.full((4, 20), -torch.inf)
    for beam in range(4):
        if search.is_alive(beam):
            search.complete(beam)
    assert search.step(rows) == ()
    assert search.done
    assert {(one.token_ids, one.score) for one in search.best(4)} == {((3, 1), -1.0), ((4, 5), -1.5)}


@pytest.mark.parametrize("kind", [0, 1])
def test_a_search_with_nothing_to_go_on_with(kind: int) -> None:
    """A search whose tokens are all forbidden is done, without a text."""
    search = searches()[kind]
    assert search.step(torch.full((1, 20), -torch.inf)) == ()
    assert search.done
    assert search.best(4) == []


@pytest.mark.parametrize("ends", [(), (5,), (5, 6, 7)])
def test_a_search_of_one_step(ends: Collection[int]) -> None:
    """The best tokens of one step are the hypotheses, whether they end the text or its length does."""
    row = torch.log_softmax(torch.arange(20.0)[None] / 4, -1)
    search = BeamSearch(3, 1, ends, 1.0, "heuristic")
    assert search.step(row) == ()
    assert [one.token_ids for one in search.best(3)] == [(19,), (18,), (17,)]
    assert [one.score for one in search.best(3)] == pytest.approx(row[0].flip(0)[:3].tolist())
