"""Provisioned requests beside best-effort work: the scheduler and its estimates, on a machine of known costs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_runs import sequence_of
from tiny_models import prompt_of, request_of

from mlflow_llm.serving.engine.attention.kv_cache import LayerShape
from mlflow_llm.serving.engine.attention.slot_cache import SlotKVCache
from mlflow_llm.serving.engine.scheduling.scheduler import ScheduledChunk, Scheduler
from mlflow_llm.serving.engine.scheduling.sequence import Sampled, SequenceState
from mlflow_llm.serving.engine.scheduling.step_time_budget import PROVISIONED_PACE, STANDARD_PACE, StepCost, StepLoad

Cost = Callable[[StepLoad], float]


def cpu(work: StepLoad) -> float:
    """Return about the time of a small int8 model on two cores: 20 ms, 1.2 ms a sequence, 0.4 ms a prompt token."""
    step = 0.020 + 0.0012 * work.rows + 0.0004 * work.chunk_tokens + 0.001 * work.chunks
    return step + 2e-7 * work.context


def native(work: StepLoad) -> float:
    """Return the time of a fast step in which a further sequence costs much and large batches are cheaper per piece."""
    return 0.003 + 0.001 * work.rows**0.8 + 0.0003 * work.chunk_tokens + 1e-7 * work.context


class Machine:
    """A scheduler whose steps take the time ``cost`` says; ``ticks`` are (provisioned work, its time alone, time)."""

    def __init__(self, cost: Cost, *, num_tokens: int = 40_000, max_num_seqs: int = 32, num_slots: int = 64) -> None:
        shapes = [LayerShape(1, 8, 8)]
        self.cache = SlotKVCache(
            shapes, num_slots=num_slots, num_tokens=num_tokens, max_model_len=512, dtype=torch.float32
        )
        self.scheduler = Scheduler(self.cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=256)
        self.cost = cost
        self.noise = random.Random(3)
        self.ticks: list[tuple[StepLoad, float, float]] = []
        self.tokens: dict[bool, int] = {False: 0, True: 0}
        self.sequences: list[SequenceState] = []

    def add(self, prompt: int, new: int, *, provisioned: bool, **more: Any) -> SequenceState:
        number = len(self.sequences)
        request = request_of(str(number), prompt_of(prompt, number), max_tokens=new, provisioned=provisioned, **more)
        sequence = sequence_of(request, number, max_model_len=512)
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def keep(self, count: int, *, provisioned: bool, prompt: int = 40, new: int = 60) -> None:
        """Keep ``count`` callers active, each of which sends its next request when the last has ended."""
        running = sum(1 for s in self.sequences[-400:] if s.status != "finished" and s.provisioned == provisioned)
        for _ in range(count - running):
            self.add(prompt, new, provisioned=provisioned)

    def step(self) -> list[ScheduledChunk]:
        runs = self.scheduler.schedule()
        provisioned, work = StepLoad.of(r for r in runs if r.sequence.provisioned), StepLoad.of(runs)
        seconds = self.cost(work) * self.noise.uniform(0.97, 1.03)
        self.ticks.append((provisioned, self.cost(provisioned) if provisioned else 0.0, seconds))
        for run in runs:
            sequence = run.sequence
            assert run.start == sequence.num_computed
            assert sequence.status == "running"
            samples = run.samples
            sequence.num_computed += run.num_tokens
            self.cache.computed(sequence.id, sequence.tokens, sequence.num_computed)
            if samples:
                self.tokens[sequence.provisioned] += 1
                if sequence.extend([Sampled(9)]):
                    self.scheduler.finish(sequence)
        self.scheduler.record_step_time(runs, seconds)
        self.cache.check_integrity()
        return runs


def stretch(ticks: list[tuple[StepLoad, float, float]]) -> list[float]:
    return [seconds / alone for provisioned, alone, seconds in ticks if provisioned]


@pytest.mark.parametrize("cost", [cpu, native])
@pytest.mark.parametrize("callers", [1, 8, 20])
def test_a_flood_leaves_provisioned_callers_their_pace(cost: Cost, callers: int) -> None:
    """Steps with provisioned work take at most 1.1 of their time alone on average, and best-effort work advances."""
    machine = Machine(cost)
    for _ in range(600):
        machine.keep(callers, provisioned=True)
        machine.keep(64, provisioned=False)
        machine.step()
    ticks = [t for t in machine.ticks[100:] if t[0]]
    assert sum(t[2] for t in ticks) <= 1.1 * sum(t[1] for t in ticks)
    assert machine.tokens[False] > 20


def test_no_single_step_is_long() -> None:
    """When best-effort work fits into the limit of a step, 99 % of steps take at most 1.25 of their time alone."""
    machine = Machine(cpu)
    for _ in range(600):
        machine.keep(8, provisioned=True)
        machine.keep(64, provisioned=False)
        machine.step()
    stretched = sorted(stretch(machine.ticks[100:]))
    assert stretched[int(0.99 * len(stretched))] <= 1.25


def test_best_effort_work_uses_its_share() -> None:
    """Best-effort work uses nearly all the time that the guarantee leaves: steps take 1.03 of their time alone, or
    more."""
    machine = Machine(cpu)
    for _ in range(600):
        machine.keep(8, provisioned=True)
        machine.keep(64, provisioned=False)
        machine.step()
    ticks = machine.ticks[100:]
    assert sum(t[2] for t in ticks) >= 1.03 * sum(t[1] for t in ticks)


def test_costs_that_change_are_learned_again() -> None:
    """The estimates follow a machine that becomes twice as slow and a step that becomes three times as fast."""
    machine = Machine(cpu)
    for factor in (1.0, 2.0, 0.3):
        machine.cost = lambda work, factor=factor: factor * cpu(work)
        for _ in range(300):
            machine.keep(8, provisioned=True)
            machine.keep(64, provisioned=False)
            machine.step()
        ticks = [t for t in machine.ticks[-150:] if t[0]]
        assert sum(t[2] for t in ticks) <= 1.1 * sum(t[1] for t in ticks)
        provisioned = ticks[-1][0]
        assert machine.scheduler.budget.cost.predict(provisioned) == pytest.approx(machine.cost(provisioned), rel=0.1)


def test_best_effort_work_has_whole_steps_when_nothing_is_provisioned() -> None:
    """Without provisioned sequences, also after some, every decoding sequence is in every step."""
    machine = Machine(cpu)
    machine.keep(4, provisioned=True)
    while any(s.provisioned and s.status != "finished" for s in machine.sequences):
        machine.step()
    machine.keep(30, provisioned=False, prompt=5)
    lingering = 0.0
    while lingering < PROVISIONED_PACE.linger_seconds:
        assert machine.step()
        lingering += machine.ticks[-1][2]
    for _ in range(20):
        machine.step()
    assert len(machine.step()) == 30


def test_steps_stay_short_for_a_moment_after_provisioned_work() -> None:
    """Steps stay short for a moment after provisioned work, so that the caller's next request does not wait long."""
    machine = Machine(cpu)
    machine.keep(64, provisioned=False, prompt=100)
    for _ in range(30):
        machine.step()
    whole = max(seconds for _, _, seconds in machine.ticks)
    first = machine.add(10, 30, provisioned=True)
    while first.status != "finished":
        machine.step()
    machine.step()
    assert machine.ticks[-1][2] < 0.5 * whole


def test_best_effort_work_saves_up_for_a_costly_sequence() -> None:
    """When one more sequence costs half a step, best-effort work saves up budget for it and is not starved."""
    machine = Machine(lambda work: 0.004 * work.rows + 0.002 * work.chunk_tokens + 0.004)
    for _ in range(900):
        machine.keep(1, provisioned=True)
        machine.keep(64, provisioned=False)
        machine.step()
    assert machine.tokens[False] > 5
    ticks = [t for t in machine.ticks[200:] if t[0]]
    assert sum(t[2] for t in ticks) <= 1.11 * sum(t[1] for t in ticks)


def test_best_effort_work_runs_in_order_of_arrival() -> None:
    """Beside provisioned work the oldest best-effort sequences are carried to their end, the others wait."""
    machine = Machine(cpu)
    machine.keep(8, provisioned=True, new=400)
    for _ in range(20):
        machine.step()
    best_effort = [machine.add(10, 10, provisioned=False) for _ in range(20)]
    ended: list[int] = []
    while len(ended) < 6:
        machine.step()
        ended += [s.id for s in best_effort if s.status == "finished" and s.id not in ended]
    assert ended == sorted(ended)
    assert ended[0] == best_effort[0].id
    assert {s.num_generated for s in best_effort[10:]} == {0}


def test_provisioned_sequences_take_slots_from_best_effort_ones() -> None:
    """When best-effort work has all slots, its newest sequence gives up its slot at once and resumes from cached KV."""
    machine = Machine(cpu, max_num_seqs=4, num_slots=8)
    machine.keep(6, provisioned=False, prompt=20, new=100)
    for _ in range(5):
        machine.step()
    running = list(machine.scheduler.running)
    before = {s.id: s.num_computed for s in running}
    provisioned = machine.add(20, 5, provisioned=True)
    machine.step()
    assert provisioned.num_generated == 1
    assert running[-1].status == "waiting"
    assert [s.status for s in running[:-1]] == ["running"] * 3
    while provisioned.status != "finished":
        machine.step()
    while running[-1].status == "waiting":
        machine.step()
    assert running[-1].num_computed >= before[running[-1].id]


def test_provisioned_sequences_take_memory_from_best_effort_ones() -> None:
    """A provisioned prompt without free memory takes that of the newest best-effort sequences."""
    machine = Machine(cpu, num_tokens=200)
    machine.keep(5, provisioned=False, prompt=35, new=20)
    for _ in range(3):
        machine.step()
    provisioned = machine.add(100, 5, provisioned=True)
    machine.step()
    assert provisioned.status == "running"
    assert provisioned.num_computed == 100
    while machine.scheduler.has_work():
        assert machine.step()


def test_a_provisioned_sequence_does_not_wait_for_best_effort_work() -> None:
    """A provisioned sequence does not wait for a prefix that best-effort work computes: it computes its own."""
    machine = Machine(cpu, max_num_seqs=8)
    prompt = prompt_of(300, 1)
    requests = [request_of(name, prompt, max_tokens=4, provisioned=name == "r") for name in ("s", "r")]
    best_effort, provisioned = (sequence_of(request, i, max_model_len=512) for i, request in enumerate(requests))
    machine.scheduler.add(best_effort)
    machine.step()
    assert 0 < best_effort.num_computed < 300
    machine.scheduler.add(provisioned)
    machine.step()
    assert provisioned.num_computed > best_effort.num_computed


def test_random_arrivals_and_ends_of_both_kinds() -> None:
    """With random arrivals, ends and scarce memory the accounts stay right, no step is empty, and all end."""
    draw = random.Random(5)
    machine = Machine(native, num_tokens=400, max_num_seqs=5, num_slots=10)
    for _ in range(300):
        sequence = machine.add(draw.randint(1, 90), draw.randint(1, 40), provisioned=draw.random() < 0.3)
        for _ in range(draw.randint(0, 8)):
            machine.step()
        if draw.random() < 0.3 and sequence.status != "finished":
            machine.scheduler.finish(sequence, keep=draw.random() < 0.5)
    steps = 0
    while machine.scheduler.has_work():
        machine.step()
        steps += 1
        assert steps < 20_000
    assert {s.status for s in machine.sequences} == {"finished"}
    assert machine.scheduler.num_preemptions > 0


def test_background_work_leaves_standard_requests_their_pace() -> None:
    """Beside standard sequences, background ones add at most 5 % to the time of steps, and advance."""
    machine = Machine(cpu)
    standard: list[SequenceState] = []
    for _ in range(600):
        standard = [s for s in standard if s.status != "finished"]
        standard += [machine.add(40, 60, provisioned=False) for _ in range(8 - len(standard))]
        if len(machine.scheduler.waiting) < 20:
            machine.add(40, 60, provisioned=False, background=True)
        runs = machine.step()
        alone = StepLoad.of(run for run in runs if not run.sequence.request.background)
        machine.ticks[-1] = (alone, machine.cost(alone) if alone else 0.0, machine.ticks[-1][2])
    ticks = [tick for tick in machine.ticks[100:] if tick[0]]
    assert sum(tick[2] for tick in ticks) <= 1.05 * sum(tick[1] for tick in ticks)
    assert sum(s.num_generated for s in machine.sequences if s.request.background) > 20


def test_a_standard_request_takes_the_slot_of_a_background_one() -> None:
    """When background work has all slots, a standard sequence starts in the next step, and a background one waits."""
    machine = Machine(cpu, max_num_seqs=4, num_slots=8)
    background = [machine.add(20, 100, provisioned=False, background=True) for _ in range(4)]
    while {s.status for s in background} != {"running"}:
        machine.step()
    standard = machine.add(20, 5, provisioned=False)
    machine.step()
    assert standard.num_generated == 1
    assert [s.status for s in background].count("waiting") == 1
    while machine.scheduler.has_work():
        assert machine.step()


def test_a_first_token_does_not_wait_for_background_work() -> None:
    """Until a standard request has its first token, steps have no background work, whatever was saved up for it."""
    machine = Machine(cpu)
    for _ in range(8):
        machine.add(100, 200, provisioned=False, background=True)
    machine.add(20, 400, provisioned=False)
    for _ in range(60):
        machine.step()
    later = machine.add(400, 40, provisioned=False)
    beside = []
    while not later.num_generated:
        beside += [run for run in machine.step() if run.sequence.request.background]
    assert beside == []
    while later.status != "finished":
        beside += [run for run in machine.step() if run.sequence.request.background]
    assert beside


def test_background_steps_stay_short_while_standard_requests_are_expected() -> None:
    """For ten seconds of steps after a standard request, a step of background work takes little more than one token of
    one sequence; then it has whole steps again."""
    machine = Machine(cpu)
    for prompt in (20, 60, 120, 40, 80):
        standard = machine.add(prompt, 20, provisioned=False)
        while standard.status != "finished":
            machine.step()
    for _ in range(8):
        machine.add(200, 200, provisioned=False, background=True)
    lingering, longest = 0.0, 0.0
    while lingering < STANDARD_PACE.linger_seconds:
        machine.step()
        lingering += machine.ticks[-1][2]
        longest = max(longest, machine.ticks[-1][2])
    assert longest <= 1.4 * cpu(StepLoad(rows=1))
    assert sum(s.num_generated for s in machine.sequences if s.request.background) > 100
    assert sum(chunk.num_tokens for chunk in machine.step()) >= 64


def times_of(background: bool) -> tuple[list[float], list[float], int]:
    """Return the times to the first token, and per later one, of four callers that pause; and the tokens of a batch."""
    machine, draw, now = Machine(cpu), random.Random(1), 0.0
    due = sorted(draw.uniform(0, 1) for _ in range(4))
    sent: list[list[Any]] = []  # sequence, when it came, when it had its first token
    first, later = [], []
    while now < 60:
        while due and due[0] <= now:
            sent.append([machine.add(100, 40, provisioned=False), due.pop(0), None])
        if background and sum(s.request.background and s.status != "finished" for s in machine.sequences[-64:]) < 8:
            machine.add(300, 64, provisioned=False, background=True)
        if not machine.scheduler.has_work():
            now = due[0]
            continue
        machine.step()
        now += machine.ticks[-1][2]
        for one in list(sent):
            sequence, came, began = one
            if began is None and sequence.num_generated:
                one[2] = began = now
                first.append(now - came)
            if sequence.status == "finished":
                later.append((now - began) / (sequence.num_generated - 1))
                sent.remove(one)
                due = sorted([*due, now + draw.uniform(0, 2)])
    return first[10:], later[10:], sum(s.num_generated for s in machine.sequences if s.request.background)


def test_callers_that_pause_do_not_notice_a_batch() -> None:
    """At the 99th percentile, callers wait at most 5 % longer for first and later tokens while a batch advances."""
    alone, beside = times_of(background=False), times_of(background=True)
    for one, other in zip(alone[:2], beside[:2], strict=True):
        of_one, of_other = (sorted(times)[int(len(times) * 0.99)] for times in (one, other))
        assert of_other <= 1.05 * of_one
    assert beside[2] > 200


def test_background_work_alone_has_whole_steps() -> None:
    """Without others, every decoding background sequence is in every step."""
    machine = Machine(cpu)
    for _ in range(12):
        machine.add(5, 40, provisioned=False, background=True)
    for _ in range(5):
        machine.step()
    assert len(machine.step()) == 12


def test_random_arrivals_of_three_classes() -> None:
    """With sequences of all classes, random ends and scarce memory, no step is empty and all end."""
    draw = random.Random(7)
    machine = Machine(native, num_tokens=400, max_num_seqs=5, num_slots=10)
    for _ in range(300):
        kind = draw.choice(["provisioned", "background", "standard"])
        sequence = machine.add(
            draw.randint(1, 90),
            draw.randint(1, 40),
            provisioned=kind == "provisioned",
            background=kind == "background",
        )
        for _ in range(draw.randint(0, 8)):
            machine.step()
        if draw.random() < 0.3 and sequence.status != "finished":
            machine.scheduler.finish(sequence, keep=draw.random() < 0.5)
    steps = 0
    while machine.scheduler.has_work():
        assert machine.step()
        steps += 1
        assert steps < 20_000
    assert {s.status for s in machine.sequences} == {"finished"}


def test_the_cost_model_finds_a_known_cost() -> None:
    """The cost model recovers the known costs of a sequence, of prompt tokens and of a whole step."""
    draw, cost = random.Random(2), StepCost()
    for _ in range(300):
        rows, tokens = draw.randint(0, 12), draw.choice([0, 0, 50, 100])
        work = StepLoad(rows, tokens, 1 if tokens else 0, 100 * rows + tokens)
        cost.observe(work, cpu(work) * (20.0 if draw.random() < 0.01 else 1.0))
    assert cost.row(100) == pytest.approx(0.00122, rel=0.2)
    assert cost.chunk(0, 100) - cost.chunk(0, 50) == pytest.approx(0.02, rel=0.1)
    assert cost.predict(StepLoad(8, 0, 0, 800)) == pytest.approx(cpu(StepLoad(8, 0, 0, 800)), rel=0.05)
