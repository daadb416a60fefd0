"""The prefix cache finds a prefix only under the salt and the adapter that it was computed under."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from engine_runs import Outcome, run, take
from tiny_models import prompt_of, request_of

from mlflow_llm.serving.engine.attention.kv_cache import LayerShape, PrefixKey
from mlflow_llm.serving.engine.attention.slot_cache import SlotKVCache
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.events import Tokens
from mlflow_llm.serving.interface.settings import EngineSettings
from mlflow_llm.serving.transport.client.inflight import InflightRequest

PROMPT = prompt_of(40, 0)


@pytest.fixture
def core(tiny_bundle: Bundle) -> EngineCore:
    core = EngineCore(tiny_bundle, EngineSettings(dtype="float32", max_num_seqs=4))
    yield core
    core.close()


def cached(core: EngineCore, name: str, salt: str | None, **more: object) -> int:
    return run(core, request_of(name, PROMPT, cache_salt=salt, **more))[name].finished[0].num_cached_tokens


def test_another_salt_finds_nothing(core: EngineCore) -> None:
    """A prompt known under one salt is computed again under another, with the same text, and then known there."""
    first = run(core, request_of("a", PROMPT, cache_salt="a"))["a"]
    other = run(core, request_of("b", PROMPT, cache_salt="b"))["b"]
    assert (first.finished[0].num_cached_tokens, other.finished[0].num_cached_tokens) == (0, 0)
    assert first.tokens == other.tokens
    assert [cached(core, name, name) for name in ("a", "b")] == [39, 39]


def test_a_miss_computes_every_token(core: EngineCore) -> None:
    """Under another salt the engine computes every token of the prompt."""
    for salt in ("a", "b"):
        core.add(request_of(salt, PROMPT, cache_salt=salt, max_tokens=1))
        runs = core.parts.scheduler.schedule()
        assert sum(one.num_tokens for one in runs) == len(PROMPT)
        core.run_step(runs, core.forward_step)
        take(core, {salt: Outcome()})


def test_without_a_salt_only_choices_share(core: EngineCore) -> None:
    """A request without a salt shares with no other, its own choices with each other."""
    assert [cached(core, name, None) for name in ("a", "b")] == [0, 0]
    outcome = run(core, request_of("c", PROMPT, cache_salt=None, n=3))["c"]
    assert [outcome.finished[i].num_cached_tokens for i in range(3)] == [0, 39, 39]


def test_requests_side_by_side_do_not_wait_for_each_other(core: EngineCore) -> None:
    """A prompt waits for one like it that is being computed only under the same salt: waiting would tell, too."""
    for salt in ("a", "b"):
        core.add(request_of(salt, PROMPT, cache_salt=salt))
    assert {one.sequence.request.request_id for one in core.parts.scheduler.schedule()} == {"a", "b"}


def test_a_preempted_sequence_keeps_its_key(core: EngineCore) -> None:
    """A preempted sequence starts again under its own salt, beside an equal prompt of another salt."""
    for salt in ("a", "b"):
        core.add(request_of(salt, PROMPT, cache_salt=salt))
    outcomes = {"a": Outcome(), "b": Outcome()}
    take(core, outcomes, max_steps=3)
    (sequence,) = [s for s in core.parts.scheduler.running if s.request.request_id == "b"]
    core.parts.scheduler.preempt(sequence)
    assert core.parts.cache.match(sequence.key, sequence.tokens) == (0, None)
    take(core, outcomes)
    assert outcomes["a"].tokens == outcomes["b"].tokens
    assert sequence.key == PrefixKey("", "b")


class Sink:
    paused = is_full = is_drained = False

    def put(self, event: object) -> None:
        pass


def test_a_continuation_carries_the_salt(core: EngineCore) -> None:
    """A continuation after a crash, a move or a pause is looked up under the request's own salt."""
    request = request_of("r", PROMPT, cache_salt="b", max_tokens=8)
    running = InflightRequest(request, 1, Sink())
    running.deliver(Tokens(0, (5, 6), (), 0))
    continuation = running.continuation(256)
    assert continuation is not None
    assert (continuation.cache_salt, continuation.sequences[0].resumed_token_ids) == ("b", (5, 6))
    run(core, request_of("a", (*PROMPT, 5, 6), cache_salt="a"))
    assert run(core, continuation)["r"].finished[0].num_cached_tokens == 0


def test_no_match_ever_crosses_a_key() -> None:
    """Over thousands of random acquisitions, growths, releases and evictions, a hit is a prefix of what was computed
    under the very same adapter and salt."""
    random.seed(7)
    cache = SlotKVCache([LayerShape(1, 8, 8)], num_slots=6, num_tokens=400, max_model_len=128, dtype=torch.float32)
    keys = [PrefixKey(adapter, salt) for adapter in ("", "x#1") for salt in ("s", "t", "u")]
    computed: dict[PrefixKey, list[np.ndarray]] = {key: [] for key in keys}
    active: list[int] = []
    hits = 0
    for owner in range(3000):
        key = random.choice(keys)
        # the same few beginnings under every key
        tokens = np.array([random.randrange(3)] * 20 + [random.randrange(3) for _ in range(12)], dtype=np.int32)
        length = cache.acquire(owner, key, tokens)
        if length is not None:
            hits += length > 0
            known = [old for old in computed[key] if np.array_equal(old[:length], tokens[:length])]
            assert not length or known
            cache.computed(owner, tokens, len(tokens))
            computed[key].append(tokens)
            active.append(owner)
        while len(active) > random.randrange(5):
            cache.release(active.pop(0), keep=random.random() < 0.8)
        if random.random() < 0.01:
            cache.forget("x#1")
        cache.check_integrity()
    assert hits > 300
