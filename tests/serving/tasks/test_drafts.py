"""Predicted outputs, as tokens of the model or refused."""

from typing import Any

import msgspec
import numpy as np
import pytest
from scripted_engine import ScriptedEngine

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.interface.errors import InvalidField
from mlflow_llm.serving.interface.events import DraftCounts, Finished, Tokens
from mlflow_llm.serving.interface.request import Draft, DraftTokens, RawBeams, RawCompletion, RawSampling
from mlflow_llm.serving.tasks.prepare import prepare
from mlflow_llm.serving.tasks.reply import generate

HI = [{"role": "user", "content": "hello world"}]


def drafted(endpoint: Any, draft: Draft, **more: Any) -> DraftTokens | None:
    raw = RawCompletion(prompts=("hello",), sampling=RawSampling(draft=draft, **more))
    found = prepare(raw, endpoint).sampling
    assert found is not None
    return found.draft


def refused(endpoint: Any, draft: Draft, **more: Any) -> InvalidField:
    with pytest.raises(InvalidField) as caught:
        drafted(endpoint, draft, **more)
    assert len(caught.value.message) < 300
    return caught.value


def logits(endpoint: Any, *token_ids: int, change: Any = None) -> bytes:
    rows = np.zeros((len(token_ids), endpoint.info.vocab_size), dtype="<f4")
    if change is not None:
        rows[change[0], change[1]] = change[2]
    return rows.tobytes()


def test_a_predicted_text_is_its_tokens(endpoint, text):
    """A predicted text becomes tokens without a BOS, cut to the longest possible text."""
    found = DIALECTS["mlflow"].read({"messages": HI, "prediction": {"type": "content", "content": "brown fox"}})
    sampling = prepare(found, endpoint).sampling
    assert sampling.draft == DraftTokens(token_ids=text.encode("brown fox", False))
    assert drafted(endpoint, Draft(text="")) == DraftTokens(token_ids=())
    assert len(drafted(endpoint, Draft(text="fox " * 5000)).token_ids) == endpoint.context


def test_tokens_and_logits_as_they_are(endpoint):
    """Draft ids are checked against the vocabulary, and logits need one row for each id."""
    rows = logits(endpoint, 5, 6)
    assert drafted(endpoint, Draft(token_ids=(5, 6), logits=rows)) == DraftTokens(token_ids=(5, 6), logits=rows)
    never = logits(endpoint, 5, 6, change=(0, 7, -np.inf))
    assert drafted(endpoint, Draft(token_ids=(5, 6), logits=never)) is not None


def test_refusals(endpoint):
    """An invalid prediction is refused with its name and what is allowed."""
    size = endpoint.info.vocab_size
    assert refused(endpoint, Draft(token_ids=(5, size))).param == "draft_input_ids[1]"
    assert refused(endpoint, Draft(token_ids=(-1,))).param == "draft_input_ids[0]"
    assert refused(endpoint, Draft(token_ids=(5,) * 600)).param == "draft_input_ids"
    wrong = refused(endpoint, Draft(token_ids=(5, 6), logits=b"\0" * 12))
    assert (wrong.param, f"[2, {size}]" in wrong.message) == ("draft_logits", True)
    assert refused(endpoint, Draft(token_ids=(5,), logits=b"")).param == "draft_logits"
    for bad in (np.nan, np.inf):
        assert refused(endpoint, Draft(token_ids=(5,), logits=logits(endpoint, 5, change=(0, 9, bad)))).param
    impossible = Draft(token_ids=(5, 6), logits=logits(endpoint, 5, 6, change=(1, 6, -np.inf)))
    assert refused(endpoint, impossible).param == "draft_logits[1]"
    assert refused(endpoint, Draft(text="a", field="prediction"), beams=RawBeams(width=2)).param == "prediction"


def test_usage_has_the_drafts_of_all_choices(endpoint, text):
    """Usage sums the drafts of all choices, with accepted and rejected tokens where there was a prediction."""
    body = {"messages": HI, "n": 2}
    plain = prepare(DIALECTS["mlflow"].read(body), endpoint)
    draft = DraftTokens(token_ids=(5,))
    predicting = msgspec.structs.replace(plain, sampling=msgspec.structs.replace(plain.sampling, draft=draft))

    def usage(request):
        events = [e for i in range(2) for e in (Tokens(i, (9,)), Finished(i, "stop", drafts=DraftCounts(5, 3, 2, 1)))]
        return generate.gather(generate.run(ScriptedEngine(events), request, text)).usage

    assert (usage(plain).draft_tokens, usage(plain).accepted_draft_tokens) == (10, 6)
    assert usage(plain).accepted_prediction_tokens is None
    assert (usage(predicting).accepted_prediction_tokens, usage(predicting).rejected_prediction_tokens) == (2, 2)
