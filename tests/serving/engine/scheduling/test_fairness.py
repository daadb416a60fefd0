"""Fair sharing between tenants: by tokens over weights, without credit for idleness, below priorities."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_runs import Outcome, sequence_of, take
from tiny_models import prompt_of, request_of

from mlflow_llm.serving.engine.attention.kv_cache import LayerShape
from mlflow_llm.serving.engine.attention.slot_cache import SlotKVCache
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.requests.embedding_queue import EmbeddingQueue
from mlflow_llm.serving.engine.scheduling.scheduler import Scheduler
from mlflow_llm.serving.engine.scheduling.sequence import Sampled, SequenceState
from mlflow_llm.serving.engine.scheduling.tenants import (
    GENERATED_TOKEN_WEIGHT,
    MAX_TENANTS,
    LeastServed,
    Tenant,
    Tenants,
)
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.engine import QUEUE_FLOOR
from mlflow_llm.serving.interface.request import Beams, Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings

_ids = iter(range(10**9))


def waiting(tenant: str, prompt: int = 10, **more: Any) -> SequenceState:
    """Return a new sequence of ``tenant``; prompts share no prefix."""
    id = next(_ids)
    return sequence_of(request_of(f"r{id}", prompt_of(prompt, id), tenant=tenant, **more), id)


class Runs:
    """A scheduler without a model: ``step`` gives every run that samples token 9."""

    def __init__(self, *, seqs: int = 4, tokens: int = 1000, step: int = 64) -> None:
        shapes = [LayerShape(2, 8, 8)]
        self.cache = SlotKVCache(shapes, num_slots=seqs, num_tokens=tokens, max_model_len=256, dtype=torch.float32)
        self.scheduler = Scheduler(self.cache, max_num_seqs=seqs, max_num_batched_tokens=step)
        self.started: list[SequenceState] = []
        self.ended: list[SequenceState] = []
        self.served: Counter[str] = Counter()

    def add(self, *sequences: SequenceState) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)

    def step(self) -> None:
        runs = self.scheduler.schedule()
        self.cache.decode_order([run.sequence.id for run in runs if run.num_tokens == 1])
        for run in runs:
            sequence = run.sequence
            if sequence not in self.started:
                self.started.append(sequence)
            samples = run.samples
            sequence.num_computed += run.num_tokens
            self.served[sequence.request.tenant] += run.num_tokens
            self.cache.computed(sequence.id, sequence.tokens, sequence.num_computed)
            if samples:
                sequence.charge(1)
                if sequence.extend([Sampled(9)]):
                    self.scheduler.finish(sequence)
                    self.ended.append(sequence)
        self.cache.check_integrity()

    def until(self, sequence: SequenceState) -> int:
        """Step until the sequence ends, and return how many others ended before."""
        while sequence.status != "finished":
            self.step()
        return self.ended.index(sequence)

    def drain(self) -> None:
        while self.scheduler.has_work():
            self.step()


def test_a_backlog_does_not_starve_a_single_request() -> None:
    """A single request starts as soon as there is a slot, behind a thousand requests of another tenant."""
    runs = Runs()
    runs.add(*(waiting("many", max_tokens=4) for _ in range(1000)))
    for _ in range(3):
        runs.step()
    single = waiting("few", max_tokens=4)
    runs.add(single)
    assert runs.until(single) <= 3 * 4
    assert runs.scheduler.waiting.num_tenants == 1


def test_tenants_share_by_tokens_not_by_requests() -> None:
    """Two tenants with a backlog are served as many tokens each, although one has ten times longer prompts and
    replies."""
    runs = Runs(seqs=2, tokens=2000)
    runs.add(*(waiting("long", 100, max_tokens=20) for _ in range(40)))
    runs.add(*(waiting("short", 10, max_tokens=2) for _ in range(400)))
    while len(runs.ended) < 200:
        runs.step()
    assert 0.8 < runs.served["long"] / runs.served["short"] < 1.25


@pytest.mark.parametrize("weight", [2, 5])
def test_weights_are_shares(weight: int) -> None:
    """A tenant with a higher weight gets that many times the tokens, while both have a backlog."""
    runs = Runs(seqs=2)
    runs.add(*(waiting("heavy", max_tokens=4, weight=weight) for _ in range(300)))
    runs.add(*(waiting("light", max_tokens=4) for _ in range(300)))
    while len(runs.ended) < 240:
        runs.step()
    assert runs.served["heavy"] / runs.served["light"] == pytest.approx(weight, rel=0.1)


def test_within_a_tenant_order_is_of_arrival() -> None:
    """The requests of a tenant start in the order of their arrival."""
    rng = random.Random(7)
    runs = Runs(seqs=3, tokens=300)
    runs.add(*(waiting(rng.choice("abc"), rng.randint(1, 60), max_tokens=rng.randint(1, 9)) for _ in range(120)))
    runs.drain()
    for tenant in "abc":
        ids = [sequence.id for sequence in runs.started if sequence.request.tenant == tenant]
        assert ids == sorted(ids)


def test_idleness_saves_up_no_credit() -> None:
    """A tenant that returns after long idleness takes turns with the other and gets no backlog of turns."""
    runs = Runs(seqs=1)
    runs.add(waiting("idle", max_tokens=2))
    runs.drain()
    runs.add(*(waiting("busy", max_tokens=2) for _ in range(60)))
    while len(runs.ended) < 41:
        runs.step()
    runs.add(*(waiting("idle", max_tokens=2) for _ in range(20)))
    runs.drain()
    after = [sequence.request.tenant for sequence in runs.started[42:62]]
    assert 8 <= after.count("busy") <= 12


def test_debts_stay() -> None:
    """A tenant's usage above the others' still counts when it returns: its counter is raised, never lowered."""
    tenants = Tenants()
    greedy, modest = tenants.of("greedy"), tenants.of("modest")
    greedy.used, modest.used = 900.0, 100.0
    tenants.lift(greedy, modest)
    assert (greedy.used, modest.used) == (900.0, 100.0)
    tenants.left(greedy)
    tenants.lift(modest, None)
    assert modest.used == 900.0


def test_priority_and_provisioned_rule_above() -> None:
    """Provisioned requests come first and lower priority numbers next, however much the tenant has been served."""
    runs = Runs(seqs=1)
    runs.add(*(waiting("a", max_tokens=2) for _ in range(3)))
    runs.drain()
    runs.started.clear()
    order = [
        waiting("a", max_tokens=2, provisioned=True),
        waiting("a", max_tokens=2, priority=-1),
        waiting("b", max_tokens=2),
        waiting("b", max_tokens=2, priority=3),
    ]
    runs.add(*reversed(order))
    runs.drain()
    assert runs.started == order


def test_preemption_charges_nothing_again() -> None:
    """Preempted sequences are charged for their prompt and each token once."""
    runs = Runs(seqs=4, tokens=96)
    sequences = [waiting(tenant, 16, max_tokens=24) for tenant in "abab"]
    runs.add(*sequences)
    runs.drain()
    assert runs.scheduler.num_preemptions
    for tenant in "ab":
        own = next(s.tenant for s in sequences if s.request.tenant == tenant)
        assert own.used == 2 * (16 + GENERATED_TOKEN_WEIGHT * 24)
        assert (own.num_unfinished, own.num_waiting) == (0, 0)


def test_a_continuation_is_charged_for_what_is_new() -> None:
    """A request that continues after a pause or in another engine is charged only for new tokens."""
    runs = Runs()
    resumed = waiting("a", 16, max_tokens=24, resumed=(9,) * 20)
    runs.add(resumed)
    runs.drain()
    assert resumed.tenant.used == GENERATED_TOKEN_WEIGHT * 4


def test_a_newcomer_is_not_the_first_to_lose_its_memory() -> None:
    """With scarce memory the sequences that started last are preempted, so a started request of a new tenant is
    preempted at most once."""
    runs = Runs(seqs=4, tokens=100)
    runs.add(*(waiting("many", 20, max_tokens=16) for _ in range(40)))
    for _ in range(8):
        runs.step()
    single = waiting("few", 20, max_tokens=16)
    runs.add(single)
    runs.until(single)
    assert single.num_preemptions <= 1
    runs.drain()
    assert len(runs.ended) == 41


def test_random_loads_end_and_are_accounted() -> None:
    """Any mix of tenants, weights, priorities, sizes, aborts and short memory ends, and leaves nothing behind."""
    for seed in range(12):
        rng = random.Random(seed)
        runs = Runs(seqs=rng.randint(1, 6), tokens=rng.randint(120, 400))
        left = [
            waiting(
                rng.choice("abcdef"),
                rng.randint(1, 60),
                max_tokens=rng.randint(1, 30),
                weight=rng.randint(1, 4),
                priority=rng.choice((0, 0, 0, 1)),
                provisioned=rng.random() < 0.1,
            )
            for _ in range(80)
        ]
        alive: list[SequenceState] = []
        while left or runs.scheduler.has_work():
            for _ in range(min(len(left), rng.randint(0, 4))):
                alive.append(left.pop())
                runs.add(alive[-1])
            if alive and rng.random() < 0.1:
                victim = alive.pop(rng.randrange(len(alive)))
                if victim.status != "finished":
                    runs.scheduler.finish(victim)
            runs.step()
        queue = runs.scheduler.waiting
        assert (len(queue), queue.num_tenants, list(queue)) == (0, 0, [])
        assert all(one.num_waiting == one.num_unfinished == 0 for one in queue.tenants.by_name.values())


def test_turns_are_those_of_a_sorted_list() -> None:
    """The heap with its stale entries gives tenants in the order of their counters, however these grow."""
    rng = random.Random(3)
    tenants = [Tenant() for _ in range(50)]
    turns, here = LeastServed(), set[Tenant]()
    for _ in range(4000):
        tenant = rng.choice(tenants)
        match rng.randrange(4):
            case 0:
                turns.push(tenant)
                here.add(tenant)
            case 1:
                turns.discard(tenant)
                here.discard(tenant)
            case 2:
                tenant.used += rng.randint(1, 9)
            case 3 if (lowest := turns.lowest) is not None:
                assert lowest in here
                assert lowest.used == min(one.used for one in here)
        assert len(turns) == len(here)
        assert len(turns.heap) <= 2 * len(tenants) + 17


def test_a_server_of_many_tenants_forgets_those_that_are_gone() -> None:
    """Counters are kept for a few thousand tenants without requests, and for all that have some."""
    tenants = Tenants()
    present = tenants.of("present")
    present.used, present.num_unfinished = 5.0, 1
    for number in range(3 * MAX_TENANTS):
        tenants.of(str(number))
        assert len(tenants.by_name) <= MAX_TENANTS + 1
    assert tenants.of("present") is present


class Embedder:
    """An embedder that returns zero vectors."""

    def embed(self, ids: list[tuple[int, ...]]) -> Any:
        return np.zeros((len(ids), 2), dtype=np.float32)


def embedding(request_id: str, tenant: str, texts: int) -> ValidRequest:
    sequences = tuple(Sequence(prompt_token_ids=(1,) * 8) for _ in range(texts))
    return ValidRequest(request_id=request_id, task="embeddings", model="m", sequences=sequences, tenant=tenant)


def test_embeddings_of_a_tenant_do_not_wait_for_anothers_bulks() -> None:
    """Behind 200 bulk requests of one tenant, the single text of another is in the first batch."""
    queue = EmbeddingQueue(Embedder(), max_tokens=64)
    for number in range(200):
        queue.add(embedding(f"bulk-{number}", "many", 20))
    queue.run()
    queue.add(embedding("single", "few", 1))
    assert queue.num_tenants == 2
    assert "single" in [request_id for request_id, _ in queue.run()]
    for number in range(200):
        queue.drop(f"bulk-{number}")
    assert (len(queue), queue.num_tenants) == (0, 0)


def test_background_embeddings_wait_for_all_others() -> None:
    """A request comes before a background one of the same tenant, and background batches have a quarter of the size."""
    queue = EmbeddingQueue(Embedder(), max_tokens=64)
    queue.add(msgspec.structs.replace(embedding("batch", "one", 6), background=True))
    assert len(queue.run()) == 2
    queue.add(embedding("single", "one", 1))
    assert [request_id for request_id, _ in queue.run()] == ["single"]
    assert [len(queue.run()) for _ in range(2)] == [2, 2]
    assert (len(queue), queue.num_tenants) == (0, 0)


def test_a_full_queue_takes_another_tenants_request(tiny_bundle: Bundle) -> None:
    """When one tenant's backlog fills the queue, its next request is refused while another tenant's are admitted up to
    its share."""
    settings = EngineSettings(dtype="float32", max_num_seqs=2, max_queued_requests=4 * QUEUE_FLOOR)
    core = EngineCore(tiny_bundle, settings)
    requests = [request_of(f"m{i}", (1, 2, i), tenant="many", max_tokens=2) for i in range(4 * QUEUE_FLOOR)]
    others = [request_of(f"f{i}", (3, 4, i), tenant="few", max_tokens=2) for i in range(5)]
    late = request_of("late", (1, 2, 3), tenant="many")
    for request in (*requests, late, *others):
        core.add(request)
    outcomes = take(core, {request.request_id: Outcome() for request in (*requests, late, *others)})
    failed = [request_id for request_id, outcome in outcomes.items() if outcome.failed is not None]
    assert failed == ["late", "f4"]
    assert core.health().num_tenants_waiting == 0
    core.close()


def test_a_tenants_request_passes_anothers_backlog_in_the_engine(tiny_bundle: Bundle) -> None:
    """With real steps, a later request of another tenant is among the first to end beside 40 requests of one tenant,
    and has its text of alone."""
    core = EngineCore(tiny_bundle, EngineSettings(dtype="float32", max_num_seqs=2))
    many = [request_of(f"m{i}", prompt_of(9, i), tenant="many") for i in range(40)]
    few = request_of("few", prompt_of(9, 99), tenant="few")
    alone = take(_with(core, few), {"few": Outcome()})["few"].tokens[0]
    outcomes = {request.request_id: Outcome() for request in (*many, few)}
    _with(core, *many)
    take(core, outcomes, max_steps=3)
    take(_with(core, few), outcomes)
    assert outcomes["few"].tokens[0] == alone
    assert sum(one.finished[0].queue_time > outcomes["few"].finished[0].queue_time for one in outcomes.values()) > 30
    core.close()


@pytest.mark.parametrize(
    ("more", "generated"),
    [({}, 12), ({"n": 3}, 36), ({"beams": Beams(width=4), "n": 2}, 48), ({"priority": 5, "weight": 4}, 12)],
)
def test_every_token_is_charged_once(tiny_bundle: Bundle, more: dict[str, Any], generated: int) -> None:
    """A prompt is charged once for all its choices, and each generated token once, for a search those of all beams."""
    core = EngineCore(tiny_bundle, EngineSettings(dtype="float32", max_num_seqs=4))
    take(_with(core, request_of("r", prompt_of(30, 0), tenant="t", stop_token_ids=(), **more)), {"r": Outcome()})
    used = core.parts.scheduler.waiting.tenants.of("t").used
    prompt = used - GENERATED_TOKEN_WEIGHT * generated / more.get("weight", 1)
    # choices copy the first one's KV, all but the last token
    assert prompt * more.get("weight", 1) == pytest.approx(30 + 2 * (more == {"n": 3}), abs=4 * ("beams" in more))
    core.close()


def _with(core: EngineCore, *requests: ValidRequest) -> EngineCore:
    for request in requests:
        core.add(request)
    return core
