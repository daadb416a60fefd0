"""Beam searches over tiny models, and what transformers' searches are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from engine_runs import Outcome

from mlflow_llm.serving.engine.beams.beam_search import EarlyStopping, Hypothesis
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings

EARLY: dict[Any, Any] = {"heuristic": False, "first": True, "never": "never"}  # transformers' words by ours
STOPPING_OF: dict[bool | str, EarlyStopping] = {False: "heuristic", True: "first", "never": "never"}


def make_core(bundle: Bundle, **more: Any) -> EngineCore:
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 16, "kv_cache_memory": 1 << 24, **more}
    return EngineCore(bundle, EngineSettings(**settings))


def texts(outcome: Outcome) -> list[list[int]]:
    assert outcome.failed is None, outcome.failed
    assert sorted(outcome.tokens) == list(range(len(outcome.tokens)))
    return [outcome.tokens[index] for index in range(len(outcome.tokens))]


def check(found: list[Hypothesis], texts: list[list[int]], scores: list[float], ends: Sequence[int], pad: int) -> None:
    """Compare with transformers, which writes the first end token in place of any in group searches and pads early
    ends."""
    assert len(found) == len(texts)
    for one, text, score in zip(found, texts, scores, strict=True):
        size = len(one.token_ids)
        assert [*one.token_ids[:-1]] == text[: size - 1]
        assert text[size - 1] in (one.token_ids[-1], *(ends[:1] if one.token_ids[-1] in ends else ()))
        assert set(text[size:]) <= {pad}
        assert one.score == pytest.approx(score, rel=1e-5, abs=1e-5)
