"""Prompt tables: token ids after the vocabulary are rows of vectors that came with the request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import Outcome, checked_cores, run, take
from tiny_models import FAMILIES, VOCAB, make_model, prompt_of, request_of, save_bundle
from transformers import GenerationConfig

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.events import Failed
from mlflow_llm.serving.interface.request import PromptTable
from mlflow_llm.serving.interface.settings import EngineSettings

MAX_TOKENS = 8
TEXT = prompt_of(9, 1)
PROMPT = (VOCAB + 1, *TEXT, VOCAB, VOCAB + 2, *TEXT[:3])


def table(width: int, seed: int, rows: int = 3) -> PromptTable:
    vectors = np.random.default_rng(seed).normal(size=(rows, width)).astype("<f4")
    return PromptTable(data=vectors.tobytes(), num_tokens=rows)


@torch.inference_mode()
def expected(model: Any, prompt: tuple[int, ...], given: PromptTable) -> list[int]:
    """Return transformers' greedy continuation with the vectors in place of their ids."""
    vectors = torch.frombuffer(bytearray(given.data), dtype=torch.float32).reshape(given.num_tokens, -1)
    words = model.get_input_embeddings()(torch.tensor([i if i < VOCAB else 0 for i in prompt]))
    for place, token_id in enumerate(prompt):
        if token_id >= VOCAB:
            words[place] = vectors[token_id - VOCAB]
    config = GenerationConfig(max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None)
    mask = torch.ones(1, len(prompt), dtype=torch.long)
    found: list[int] = model.generate(inputs_embeds=words[None], attention_mask=mask, generation_config=config)[
        0
    ].tolist()
    return found


class Served:
    def __init__(self, family: str, folder: Path) -> None:
        self.model = make_model(FAMILIES[family]())
        self.width = self.model.get_input_embeddings().weight.shape[1]
        self.bundle = save_bundle(self.model, folder)

    def core(self, **settings: Any) -> EngineCore:
        more = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "kv_cache_memory": 1 << 24, **settings}
        return EngineCore(self.bundle, EngineSettings(**more))


@pytest.fixture(scope="module", params=["llama_wide", "gpt2", "gemma2"])
def any_served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served("llama_wide", tmp_path_factory.mktemp("served"))


@pytest.fixture
def core_of(served: Served) -> Any:
    with checked_cores(served.core) as make:
        yield make


def ask(request_id: str, prompt: tuple[int, ...], given: PromptTable | None, **more: Any) -> Any:
    return request_of(request_id, prompt, prompt_table=given, **{"max_tokens": MAX_TOKENS, **more})


def test_vectors_stand_where_their_ids_do(any_served: Served) -> None:
    """Prompts with two tables or none, chunked and beside plain requests, continue as in transformers."""
    core = any_served.core()
    tables = {str(seed): table(any_served.width, seed) for seed in (1, 2)}
    requests = [ask(name, PROMPT, given) for name, given in tables.items()]
    outcomes = run(core, *requests, ask("plain", TEXT, None), ask("whole", (VOCAB, VOCAB + 1), tables["1"]))
    for name, given in tables.items():
        assert outcomes[name].tokens[0] == expected(any_served.model, PROMPT, given)
    assert outcomes["plain"].tokens[0] == expected(any_served.model, TEXT, tables["1"])
    assert outcomes["whole"].tokens[0] == expected(any_served.model, (VOCAB, VOCAB + 1), tables["1"])
    core.close()


def test_a_prefix_is_one_of_its_table(core_of: Callable[..., EngineCore], served: Served) -> None:
    """Equal ids under different tables share no KV."""
    core = core_of()
    for seed, cached in ((1, 0), (1, len(PROMPT) - 1), (2, 0), (1, len(PROMPT) - 1)):
        outcome = run(core, ask("one", PROMPT, table(served.width, seed)))["one"]
        assert outcome.finished[0].num_cached_tokens == cached
        assert outcome.tokens[0] == expected(served.model, PROMPT, table(served.width, seed))


def test_penalties_and_drafts_leave_the_ids_of_tables_alone(core_of: Callable[..., EngineCore], served: Served) -> None:
    """Penalties count only tokens of the vocabulary, and drafts never contain ids of a table."""
    core = core_of()
    given = table(served.width, 1)
    prompt = (5, 6, 7, VOCAB, 8) * 4 + (5, 6, 7)
    more = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "temperature": 0.7}
    outcomes = run(
        core, ask("a", prompt, given, **more), ask("b", prompt, given, n=2), ask("c", prompt, given, logprobs=3)
    )
    assert all(outcome.failed is None for outcome in outcomes.values())
    assert outcomes["b"].tokens[0] == outcomes["b"].tokens[1] == expected(served.model, prompt, given)
    assert all(0 <= token < VOCAB for outcome in outcomes.values() for token in outcome.tokens[0])


def test_preemption_and_resumption_keep_the_table(core_of: Callable[..., EngineCore], served: Served) -> None:
    """A preempted or resumed request generates the same text, from the same table."""
    core = core_of(kv_cache_memory=60 * 2 * 2 * 16 * 2 * 4)
    tables = {str(seed): table(served.width, seed) for seed in range(4)}
    outcomes = run(core, *(ask(name, PROMPT, given) for name, given in tables.items()))
    for name, given in tables.items():
        assert outcomes[name].tokens[0] == expected(served.model, PROMPT, given)
    first = expected(served.model, PROMPT, tables["0"])
    resumed = run(core, ask("again", PROMPT, tables["0"], resumed=first[:3]))["again"]
    assert first[:3] + resumed.tokens[0] == first


@pytest.mark.parametrize(
    ("given", "prompt", "message"),
    [
        (PromptTable(data=b"\0" * 12, num_tokens=1), (VOCAB,), "prompt_embedding_table: '3 numbers' is not allowed"),
        (PromptTable(data=b"\xff" * 256, num_tokens=1), (VOCAB,), "prompt_embedding_table: 'nan or inf'"),
        (PromptTable(data=b"\0" * 256, num_tokens=1), (VOCAB + 1,), f"prompt: {VOCAB + 1} is not allowed"),
        (None, (VOCAB,), f"prompt: {VOCAB} is not allowed"),
        (PromptTable(data=b"", num_tokens=0), (1,), "prompt_embedding_table"),
    ],
)  # fmt: skip
def test_tables_that_do_not_fit_the_model_are_refused(
    core_of: Callable[..., EngineCore], given: PromptTable | None, prompt: tuple[int, ...], message: str
) -> None:
    """A table of another size, with numbers that are not finite or with ids after its last row fails its request by
    name."""
    core = core_of()
    outcomes = {"bad": Outcome(), "good": Outcome()}
    core.add(ask("bad", prompt, given))
    core.add(ask("good", TEXT, None))
    take(core, outcomes)
    assert isinstance(outcomes["bad"].failed, Failed)
    assert outcomes["bad"].failed.kind == "invalid_field"
    assert outcomes["bad"].failed.message.startswith(message)
    assert len(outcomes["good"].tokens[0]) == MAX_TOKENS


def test_a_prompt_of_virtual_tokens_is_not_scored(core_of: Callable[..., EngineCore], served: Served) -> None:
    """Prompt log probabilities are refused for prompts with virtual tokens, which have no probability."""
    outcome = run(core_of(), ask("one", PROMPT, table(served.width, 1), prompt_logprobs=1))["one"]
    assert outcome.failed is not None
    assert "where the prompt is scored" in outcome.failed.message
