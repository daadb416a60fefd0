"""The scheduler and its accounts of slots, without a model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import sequence_of
from tiny_models import prompt_of, request_of

from mlflow_llm.serving.engine.attention.kv_cache import LayerShape, PrefixKey
from mlflow_llm.serving.engine.attention.slot_cache import SlotKVCache
from mlflow_llm.serving.engine.scheduling.scheduler import MAX_FORCED_TOKENS_PER_STEP, Scheduler
from mlflow_llm.serving.engine.scheduling.sequence import Sampled, SequenceState

BASE = PrefixKey("", "")
ADAPTER = PrefixKey("a#1", "")


def make_cache(num_tokens: int = 1000, num_slots: int = 8) -> SlotKVCache:
    shapes = [LayerShape(2, 8, 8)]
    return SlotKVCache(shapes, num_slots=num_slots, num_tokens=num_tokens, max_model_len=256, dtype=torch.float32)


def make(id: int, prompt: tuple[int, ...], **more: Any) -> SequenceState:
    return sequence_of(request_of(str(id), prompt, **more), id)


def compute(scheduler: Scheduler, cache: SlotKVCache) -> dict[int, int]:
    """Pretend to run a step and return {sequence: tokens}; each sequence that samples gets token 9."""
    runs = scheduler.schedule()
    cache.decode_order([run.sequence.id for run in runs if run.num_tokens == 1])
    for run in runs:
        assert run.start == run.sequence.num_computed
        samples = run.samples
        run.sequence.num_computed += run.num_tokens
        cache.computed(run.sequence.id, run.sequence.tokens, run.sequence.num_computed)
        if samples and run.sequence.extend([Sampled(9)]):
            scheduler.finish(run.sequence)
    cache.check_integrity()
    return {run.sequence.id: run.num_tokens for run in runs}


def test_a_long_prompt_does_not_starve_short_ones() -> None:
    """Short prompts behind a long one start in the same step."""
    cache = make_cache()
    scheduler = Scheduler(cache, max_num_seqs=4, max_num_batched_tokens=64)
    scheduler.add(make(0, prompt_of(200, 0)))
    for i in (1, 2):
        scheduler.add(make(i, prompt_of(10, i)))
    first = compute(scheduler, cache)
    assert first == {0: 44, 1: 10, 2: 10}
    assert compute(scheduler, cache) == {1: 1, 2: 1, 0: 62}


def test_prompts_end_one_after_the_other() -> None:
    """Six prompts of equal length all start, and each is finished before the next gets the rest of a step."""
    cache = make_cache(2000)
    scheduler = Scheduler(cache, max_num_seqs=6, max_num_batched_tokens=64)
    sequences = [make(i, prompt_of(96, i)) for i in range(6)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert compute(scheduler, cache) == {0: 64}
    assert compute(scheduler, cache) == {0: 32, 1: 32}
    assert [s.status for s in sequences] == ["running"] * 6
    assert compute(scheduler, cache) == {0: 1, 1: 63}
    assert compute(scheduler, cache) == {0: 1, 1: 1, 2: 62}


def test_shorter_prompts_leave_the_first_one_its_share() -> None:
    """The first prompt gets what starting ones leave of a step: half or more, and a quarter while shorter ones run."""
    cache = make_cache(4000)
    scheduler = Scheduler(cache, max_num_seqs=40, max_num_batched_tokens=64)
    scheduler.add(make(0, prompt_of(400, 0)))
    assert compute(scheduler, cache) == {0: 64}
    for i in range(1, 7):
        scheduler.add(make(i, prompt_of(62, i), max_tokens=1))
    assert compute(scheduler, cache) == {0: 32, 1: 32}
    assert compute(scheduler, cache) == {0: 16, 1: 30, 2: 18}


def test_priority_then_arrival() -> None:
    """Lower priority numbers start first, equal ones by arrival."""
    cache = make_cache()
    scheduler = Scheduler(cache, max_num_seqs=1, max_num_batched_tokens=64)
    for i, priority in enumerate((1, 0, 1, 0)):
        scheduler.add(make(i, prompt_of(5, i), priority=priority, max_tokens=1))
    assert [next(iter(compute(scheduler, cache))) for _ in range(4)] == [1, 3, 0, 2]


def test_memory_admits_in_order() -> None:
    """A prompt that does not fit waits, and none behind it overtakes it."""
    cache = make_cache(60)
    scheduler = Scheduler(cache, max_num_seqs=8, max_num_batched_tokens=256)
    for i, size in enumerate((40, 30, 5)):
        scheduler.add(make(i, prompt_of(size, i), max_tokens=3))
    assert set(compute(scheduler, cache)) == {0}
    while scheduler.has_work():
        compute(scheduler, cache)


def test_illegal_moves_raise() -> None:
    """A finished sequence cannot run again, and a slot cannot be assigned twice."""
    cache = make_cache()
    scheduler = Scheduler(cache, max_num_seqs=1, max_num_batched_tokens=64)
    sequence = make(0, (1, 2))
    scheduler.add(sequence)
    scheduler.finish(sequence)
    with pytest.raises(RuntimeError, match="cannot become"):
        scheduler.finish(sequence)
    cache.acquire(5, BASE, np.array([1, 2], dtype=np.int32))
    with pytest.raises(RuntimeError, match="cannot be given"):
        cache.acquire(5, BASE, np.array([1, 2], dtype=np.int32))


def test_integrity_check_finds_wrong_accounts() -> None:
    """``check_integrity`` reports a wrong memory charge."""
    cache = make_cache()
    cache.acquire(1, BASE, np.array([1, 2], dtype=np.int32))
    cache.table.used += 1
    with pytest.raises(RuntimeError, match="used is 3"):
        cache.check_integrity()


def test_prefix_keys_do_not_share() -> None:
    """KV computed under one adapter is not reused under another, and is dropped with it."""
    cache = make_cache()
    tokens = np.arange(40, dtype=np.int32)
    cache.acquire(1, ADAPTER, tokens)
    cache.computed(1, tokens, 40)
    cache.release(1, keep=True)
    assert cache.match(BASE, tokens) == (0, None)
    assert cache.match(ADAPTER, tokens) == (39, None)
    cache.forget("a#1")
    assert cache.match(ADAPTER, tokens) == (0, None)
    assert cache.num_tokens_used == 0


def test_moved_slots_keep_their_numbers() -> None:
    """Gathering decodes into neighbouring slots moves KV with them."""
    cache = make_cache()
    for owner in range(6):
        cache.acquire(owner, BASE, np.array([owner] * 10, dtype=np.int32), at_most=0)
        slot = cache.table.by_owner[owner]
        cache.layers[0].k[slot.index, :, :10] = float(owner)
        cache.computed(owner, slot.tokens, 10)
    for gone in (1, 3):
        cache.release(gone, keep=True)
    for _ in range(3):
        order = cache.decode_order([0, 2, 4, 5])
    places = [cache.table.by_owner[o].index for o in order]
    assert places == list(range(places[0], places[0] + 4))
    for slot in cache.table.slots:
        if slot.length:
            assert (cache.layers[0].k[slot.index, :, :10] == float(slot.tokens[0])).all()
    cache.check_integrity()


def test_random_arrivals_ends_and_scarce_memory() -> None:
    """Thousands of steps of random arrivals, ends and scarce memory keep the accounts right and end all sequences."""
    draw = random.Random(1)
    cache = make_cache(300, num_slots=10)
    scheduler = Scheduler(cache, max_num_seqs=5, max_num_batched_tokens=32)
    alive: list[SequenceState] = []
    for i in range(400):
        sequence = make(i, prompt_of(draw.randint(1, 100), draw.randint(0, 8)), max_tokens=draw.randint(1, 40))
        alive.append(sequence)
        scheduler.add(sequence)
        for _ in range(draw.randint(0, 6)):
            compute(scheduler, cache)
        if draw.random() < 0.3:
            victim = draw.choice(alive)
            if victim.status != "finished":
                scheduler.finish(victim, keep=draw.random() < 0.5)
    while scheduler.has_work():
        assert compute(scheduler, cache)
    assert scheduler.num_preemptions > 0
    assert {s.status for s in alive} == {"finished"}


def test_a_waiting_sequence_says_what_it_waits_for() -> None:
    """A waiting sequence names a prefix being computed, or a slot or memory, and so do those behind it."""
    cache = make_cache(num_tokens=300)
    scheduler = Scheduler(cache, max_num_seqs=3, max_num_batched_tokens=64)
    prompt = prompt_of(100, 0)
    for id, tokens in enumerate([prompt, prompt, prompt_of(90, 1)]):
        scheduler.add(make(id, tokens))
    compute(scheduler, cache)
    assert {sequence.id for sequence in scheduler.running} == {0, 2}
    assert scheduler.waiting_for() == {"prefix": 1}
    scheduler.add(make(3, prompt_of(120, 2)))
    scheduler.add(make(4, prompt_of(5, 3)))
    compute(scheduler, cache)
    assert scheduler.waiting_for() == {"prefix": 1, "memory": 1, "turn": 1}
    scheduler.max_num_seqs = 2
    compute(scheduler, cache)
    assert scheduler.waiting_for() == {"slot": 1, "memory": 1, "turn": 1}  # the second was not looked at again


def test_a_step_may_give_a_sequence_several_tokens() -> None:
    """Several tokens of a step are taken up to the one that ends the sequence, and the rest are dropped."""
    sequence = make(0, prompt_of(4, 0), max_tokens=6, stop_token_ids=(7,))
    assert sequence.extend([]) is None
    assert sequence.extend([Sampled(1), Sampled(2)]) is None
    assert sequence.extend([Sampled(3), Sampled(7), Sampled(4)]) == "stop"
    assert sequence.output.tolist() == [1, 2, 3, 7]
    assert [one.token_id for one in sequence.unsent] == [1, 2, 3, 7]
    longer = make(1, prompt_of(4, 0), max_tokens=2)
    assert longer.extend([Sampled(1), Sampled(2), Sampled(3)]) == "length"
    assert longer.num_generated == 2


def test_forced_tokens_are_computed_beside_the_decodes() -> None:
    """A sequence with tokens forced by its grammar continues in the next step beside the decodes, while prompts wait,
    with at most as many tokens as leave the others their time."""
    cache = make_cache()
    scheduler = Scheduler(cache, max_num_seqs=4, max_num_batched_tokens=64)
    forced, plain = make(0, prompt_of(4, 0), max_tokens=200), make(1, prompt_of(4, 1), max_tokens=200)
    scheduler.add(forced)
    scheduler.add(plain)
    compute(scheduler, cache)
    for id in (2, 3):
        scheduler.add(make(id, prompt_of(200, id)))
    forced.forced_from = forced.num_computed
    forced.extend([Sampled(8)] * 5)
    assert {id: count for id, count in compute(scheduler, cache).items() if id < 2} == {0: 6, 1: 1}
    forced.forced_from = forced.num_computed
    forced.extend([Sampled(8)] * (MAX_FORCED_TOKENS_PER_STEP + 9))
    found = [compute(scheduler, cache) for _ in range(2)]
    assert [step[0] for step in found] == [MAX_FORCED_TOKENS_PER_STEP + 1, 9]
    assert [step[1] for step in found] == [1, 1]
    assert all(sum(step.values()) <= 64 for step in found)


def test_a_preempted_sequence_with_forced_tokens() -> None:
    """A preempted sequence with forced tokens starts again as a prompt and runs once per step."""
    cache = make_cache()
    scheduler = Scheduler(cache, max_num_seqs=4, max_num_batched_tokens=16)
    sequence = make(0, prompt_of(20, 0), max_tokens=200)
    scheduler.add(sequence)
    while sequence.num_generated == 0:
        compute(scheduler, cache)
    sequence.forced_from = sequence.num_computed
    sequence.extend([Sampled(8)] * 20)
    scheduler.preempt(sequence)
    while sequence.num_remaining > 1:
        assert sum(compute(scheduler, cache).values()) <= 16
    assert sequence.num_tokens == 42
