"""Rejection sampling of drafts that come with their logits: the distribution is the same as without drafts."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_runs import run, sequence_of
from scipy import stats
from tiny_models import FAMILIES, VOCAB, make_model, request_of, save_bundle

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.sampling.rejection_sampling import draw, is_drafted
from mlflow_llm.serving.engine.sampling.sampler import distribution, sample
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.request import DraftTokens, Sampling
from mlflow_llm.serving.interface.settings import EngineSettings

DRAWS = 100_000
V = 12


def logits_of(seed: int, spread: float = 1.5) -> Any:
    return np.random.default_rng(seed).normal(scale=spread, size=V).astype(np.float32)


def softmax(values: Any) -> Any:
    found: Any = torch.softmax(torch.from_numpy(values.astype(np.float64)), -1).numpy()
    return found


@pytest.mark.parametrize("alike", [0.0, 0.8, 1.0])
def test_draws_are_of_the_target(alike: float) -> None:
    """Tokens are distributed as the model's (chi-square, p > 0.01 over 10^5 draws), whatever the drafts were drawn
    from, and the acceptance rate is the overlap of the two. Drafts of the model's own distribution are all accepted."""
    p = softmax(logits_of(1))
    q = softmax(alike * logits_of(1) + (1 - alike) * logits_of(2, spread=3.0))
    drafts = np.random.default_rng(3).choice(V, size=DRAWS, p=q)
    rows = [torch.from_numpy(one).expand(DRAWS, V) for one in (p, q)]
    tokens = np.array(draw(rows[0], rows[1], drafts.tolist(), range(DRAWS), [7] * DRAWS))
    found = np.bincount(tokens, minlength=V)
    assert stats.chisquare(found, p * DRAWS).pvalue > 0.01
    in_common = np.minimum(p, q).sum()
    assert abs((tokens == drafts).mean() - in_common) < 0.01
    if alike == 1.0:
        assert (tokens == drafts).all()


def test_two_positions_are_independent() -> None:
    """Draws at one position are independent of the next, whether drafts were accepted or not."""
    draws = 20_000
    p, q = softmax(logits_of(1)), softmax(logits_of(2))
    random = np.random.default_rng(3)
    rows = [torch.from_numpy(one).expand(draws, V) for one in (p, q)]
    first, second = (
        draw(rows[0], rows[1], random.choice(V, size=draws, p=q).tolist(), range(draws), [place] * draws)
        for place in (7, 8)
    )
    pairs = np.zeros((V, V))
    np.add.at(pairs, (first, second), 1)
    assert stats.chi2_contingency(pairs).pvalue > 0.01


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.1},
    {"temperature": 1.0, "typical_p": 0.8},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_through_the_sampler(sampling: dict[str, Any]) -> None:
    """Texts with drafts are distributed as those without, after temperature and truncation."""
    draws = 2000
    row, own = torch.from_numpy(logits_of(4)), logits_of(5)
    random = np.random.default_rng(6)
    drafts = random.choice(V, size=draws, p=softmax(own)).tolist()
    with_drafts = [DraftTokens(token_ids=(draft,), logits=own.tobytes()) for draft in drafts]
    places = [
        sequence_of(request_of(f"{i}", [1, 2], seed=i, draft=draft, **sampling)) for i, draft in enumerate(with_drafts)
    ]
    assert all(map(is_drafted, places))
    tokens = [one.token_id for one in sample(row.expand(draws, V), places)]
    p = distribution(row[None], [Sampling(max_tokens=1, **sampling)])[0].numpy()
    found = np.bincount(tokens, minlength=V)
    assert found[p == 0].sum() == 0
    assert stats.chisquare(found[p > 0], p[p > 0] * draws).pvalue > 0.01
    plain = [sequence_of(request_of(f"{i}", [1, 2], seed=i, **sampling)) for i in range(draws)]
    wanted = np.bincount([one.token_id for one in sample(row.expand(draws, V), plain)], minlength=V)
    assert stats.chisquare(wanted[p > 0], p[p > 0] * draws).pvalue > 0.01


def test_which_positions_are_drafted() -> None:
    """A position is drafted while the text equals the draft, and only when sampling with draft logits."""
    draft = DraftTokens(token_ids=(5, 6), logits=b"\0" * 8 * VOCAB)

    def at(*output: int, **more: Any) -> bool:
        fields = {"temperature": 1.0, "draft": draft, "max_tokens": 9} | more
        return is_drafted(sequence_of(request_of("a", [1, 2], resumed=output, **fields)))

    assert [at(), at(5), at(5, 6), at(4), at(4, 6)] == [True, True, False, False, False]
    assert not at(temperature=0.0)
    assert not at(draft=DraftTokens(token_ids=(5, 6)))
    assert not at(draft=None)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return save_bundle(make_model(FAMILIES["llama_wide"]()), tmp_path_factory.mktemp("wide"))


def core_of(bundle: Bundle, speculation: Any) -> EngineCore:
    return EngineCore(bundle, EngineSettings(kv_cache_memory=1 << 24, speculation=speculation))


def drafted_requests() -> list[Any]:
    random = np.random.default_rng(8)
    found = []
    for number in range(16):
        rows = random.normal(size=(6, VOCAB)).astype(np.float32)
        ids = [int(random.choice(VOCAB, p=np.exp(row) / np.exp(row).sum(dtype=np.float64))) for row in rows]
        draft = DraftTokens(token_ids=tuple(ids), logits=rows.tobytes())
        bias = tuple((token, 9.0) for token in dict.fromkeys(ids))
        more = {"temperature": 1.0, "n": 2, "logprobs": 1, "logit_bias": bias, "seed": 100 * number}
        found.append(request_of(f"r{number}", [5, 6, 7 + number], draft=draft, **more))
    return found


def test_a_text_does_not_depend_on_the_batch(bundle: Bundle) -> None:
    """A text is the same by single or multiple tokens a step, alone or batched, and resumed anywhere; it differs from
    the one without logits only where a draft was accepted or rejected."""
    plain, drafting = core_of(bundle, "none"), core_of(bundle, "auto")
    requests = drafted_requests()
    alone = {one.request_id: run(plain, one)[one.request_id].tokens for one in requests}
    for start in range(0, len(requests), 2):
        pair = requests[start : start + 2]
        for request_id, outcome in run(drafting, *pair).items():
            assert outcome.tokens == alone[request_id]
    together = run(drafting, *requests)
    assert {request_id: outcome.tokens for request_id, outcome in together.items()} == alone
    first = alone["r0"][0]
    for count in range(1, 6):
        sequences = tuple(
            msgspec.structs.replace(one, resumed_token_ids=tuple(alone["r0"][i][:count]))
            for i, one in enumerate(requests[0].sequences)
        )
        resumed = msgspec.structs.replace(requests[0], sequences=sequences)
        assert run(drafting, resumed)["r0"].tokens[0] == first[count:]
    plain.close(), drafting.close()


def test_invalid_drafts_are_refused(bundle: Bundle) -> None:
    """Draft logits of another shape and draft tokens outside the vocabulary are refused, and the engine goes on."""
    core = core_of(bundle, "auto")
    for draft in (DraftTokens(token_ids=(5, 6), logits=b"\0" * 8), DraftTokens(token_ids=(VOCAB,))):
        outcome = run(core, request_of("a", [5], draft=draft))["a"]
        assert outcome.failed is not None
        assert outcome.failed.kind == "invalid_field"
    assert run(core, request_of("b", [5]))["b"].failed is None
    core.close()
