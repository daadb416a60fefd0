"""Provisioned requests beside a flood, on real weights."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.cores import generation_core
from mlflow_llm.serving.engine.scheduling.scheduler import ScheduledChunk
from mlflow_llm.serving.engine.scheduling.step_time_budget import StepLoad
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.events import Finished, Tokens
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.interface.settings import EngineSettings


class Clock:
    """A replacement of ``time`` in the engine: a step takes 5 ms and 50 µs a token, on any machine and beside any
    load."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def steps_with(self, core: EngineCore) -> None:
        schedule = core.parts.scheduler.schedule

        def timed() -> list[ScheduledChunk]:
            runs: list[ScheduledChunk] = schedule()
            self.now += 0.005 + 0.00005 * sum(run.num_tokens for run in runs)
            return runs

        core.parts.scheduler.schedule = timed


class Engine:
    """A core, the tokens of each request so far, and the requests in the order of their ends."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ended: list[str] = []

    def add(self, name: str, number: int) -> None:
        prompt = tuple(1000 + (number * 7919 + place * 31) % 40_000 for place in range(24))
        self.core.add(
            ValidRequest(
                request_id=name,
                task="completions",
                model="m",
                sequences=(Sequence(prompt_token_ids=prompt, seed=number),),
                sampling=Sampling(max_tokens=24, min_tokens=24),
                provisioned=not name.startswith("flood"),
            )
        )

    def step(self) -> None:
        for _, name, event in self.core.step():
            if isinstance(event, Tokens):
                self.tokens[name] += event.token_ids
            if isinstance(event, Finished):
                self.ended.append(name)
        self.core.check_integrity()

    def run(self) -> None:
        while self.core.has_work():
            self.step()


@pytest.fixture
def engine(smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    clock = Clock()
    monkeypatch.setattr(generation_core, "time", clock)
    where = str(smollm2_dir)
    bundle = Bundle(content_hash="guarantee", tasks=("completions",), model_dir=where, tokenizer_dir=where)
    settings = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory": 1 << 28, "prefix_caching": False}
    made = Engine(EngineCore(bundle, EngineSettings(quantization="int8", **settings)))
    clock.steps_with(made.core)
    return made


def test_a_flood_waits_and_changes_no_provisioned_text(engine: Engine) -> None:
    """Provisioned requests start in the next step although a flood has all slots, end first and have the text that they
    have alone; then every request of the flood is answered."""
    for number in range(3):
        engine.add(f"alone-{number}", number)
    engine.run()
    for number in range(20):
        engine.add(f"flood-{number}", 100 + number)
    for _ in range(4):
        engine.step()
    assert engine.core.health().num_running == 8
    ended = len(engine.ended)
    for number in range(3):
        engine.add(f"reserved-{number}", number)
    engine.step()
    assert engine.core.health().provisioned_tokens == 3 * 24 + 3
    while engine.core.health().num_provisioned:
        engine.step()
    assert {"reserved-0", "reserved-1", "reserved-2"} <= set(engine.ended[ended:])
    assert len(engine.ended) < ended + 3 + 8
    engine.run()
    for number in range(3):
        assert engine.tokens[f"reserved-{number}"] == engine.tokens[f"alone-{number}"]
    assert len(engine.tokens) == 26
    assert {len(tokens) for tokens in engine.tokens.values()} == {24}
    assert 0 < engine.core.parts.scheduler.budget.cost.predict(StepLoad(rows=3, context=100)) < 10
    engine.core.close()
