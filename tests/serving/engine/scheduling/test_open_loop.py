"""Open-loop load at four fifths of the engine's capacity, on a simulated clock.

A step costs what a native step was measured to: a constant, and more for each row and each prompt token.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from engine_runs import sequence_of
from tiny_models import prompt_of, request_of

from mlflow_llm.serving.engine.attention.kv_cache import LayerShape
from mlflow_llm.serving.engine.attention.slot_cache import SlotKVCache
from mlflow_llm.serving.engine.scheduling.scheduler import ScheduledChunk, Scheduler
from mlflow_llm.serving.engine.scheduling.sequence import Sampled, SequenceState

FIXED, ROW, TOKEN = 0.009, 0.0006, 0.00035  # seconds
SEQS, STEP = 16, 64 + 16
MAX_PROMPT_TOKENS = 1500  # tokens of a prompt


def seconds(runs: list[ScheduledChunk]) -> float:
    tokens = sum(run.num_tokens for run in runs if run.num_tokens > 1)
    return FIXED + ROW * sum(run.num_tokens == 1 for run in runs) + TOKEN * tokens


@dataclass
class Served:
    """A request with the time it was due and the times of its tokens."""

    sequence: SequenceState
    due: float
    times: list[float] = field(default_factory=list)


class Engine:
    """The scheduler over a cache, without a model."""

    def __init__(self, step: int = STEP) -> None:
        self.cache = SlotKVCache(
            [LayerShape(1, 8, 8)], num_slots=2 * SEQS, num_tokens=40_000, max_model_len=2048, dtype=torch.float32
        )
        self.scheduler = Scheduler(self.cache, max_num_seqs=SEQS, max_num_batched_tokens=step)
        self.now = 0.0
        self.sizes: list[int] = []  # tokens of each step

    def serve(self, requests: list[Served]) -> None:
        by_id = {one.sequence.id: one for one in requests}
        coming = sorted(requests, key=lambda one: one.due, reverse=True)
        while coming or self.scheduler.has_work():
            if not self.scheduler.has_work():
                self.now = max(self.now, coming[-1].due)
            while coming and coming[-1].due <= self.now:
                self.scheduler.add(coming.pop().sequence)
            runs = self.scheduler.schedule()
            self.cache.decode_order([run.sequence.id for run in runs if run.num_tokens == 1])
            self.now += seconds(runs)
            self.sizes.append(sum(run.num_tokens for run in runs))
            for run in runs:
                sequence, samples = run.sequence, run.samples
                sequence.num_computed += run.num_tokens
                self.cache.computed(sequence.id, sequence.tokens, sequence.num_computed)
                if samples:
                    by_id[sequence.id].times.append(self.now)
                    if sequence.extend([Sampled(9)]):
                        self.scheduler.finish(sequence)


def requests(count: int, rate: float, seed: int) -> list[Served]:
    """Return chat-like lengths with some long prompts; a Poisson process of ``rate`` a second, all at once for 0."""
    draw = random.Random(seed)
    due, found = 0.0, []
    for id in range(count):
        length = (
            MAX_PROMPT_TOKENS if id % 12 == 5 else min(MAX_PROMPT_TOKENS, max(4, int(draw.lognormvariate(4.4, 1.0))))
        )
        new = min(200, max(4, int(draw.lognormvariate(4.2, 0.7))))
        sequence = sequence_of(request_of(str(id), prompt_of(length, id), max_tokens=new), id)
        found.append(Served(sequence, due))
        due += draw.expovariate(rate) if rate else 0.0
    return found


@pytest.fixture(scope="module")
def capacity() -> float:
    """Return the requests per second when all are there from the beginning."""
    engine = Engine()
    engine.serve(requests(150, 0.0, 1))
    return 150 / engine.now


@pytest.mark.parametrize("seed", [2, 3])
def test_prompts_and_decodes_do_not_starve_each_other(capacity: float, seed: int) -> None:
    """No token comes later than the largest step after the one before it; every prompt advances in every step with few
    prompts, so that its first token comes after the time of its own tokens and turns."""
    engine = Engine()
    served = requests(150, 0.8 * capacity, seed)
    engine.serve(served)
    gaps = [b - a for one in served for a, b in pairwise(one.times)]
    assert max(gaps) <= FIXED + SEQS * ROW + (STEP - SEQS + SEQS) * TOKEN
    assert max(engine.sizes) <= STEP
    first = sorted(one.times[0] - one.due for one in served)
    alone = FIXED * -(-MAX_PROMPT_TOKENS // STEP) + MAX_PROMPT_TOKENS * TOKEN
    assert first[len(first) // 2] <= alone
    assert first[-1] <= 8 * alone
