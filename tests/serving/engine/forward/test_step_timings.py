"""Step timings for requests that ask for them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from engine_runs import wait_for_work
from tiny_models import prompt_of, request_of

from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.events import Finished, Timed, Tokens
from mlflow_llm.serving.interface.settings import EngineSettings


def events(core: EngineCore, *requests: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work():
        wait_for_work(core)
        for _, request_id, event in core.step():
            found[request_id].append(event)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_steps_are_timed_on_request(tiny_bundle: Bundle, stream: bool) -> None:
    """A request that asks gets a timing for each token, in order and before it, streamed or not; its neighbours get
    none."""
    core = EngineCore(tiny_bundle, EngineSettings(max_num_seqs=4, kv_cache_memory=1 << 24, speculation="none"))
    asks = msgspec.structs.replace(request_of("a", prompt_of(5, 1), max_tokens=20), timings=True, stream=stream)
    found = events(core, asks, request_of("b", prompt_of(7, 2), max_tokens=20))
    assert not any(isinstance(event, Timed) for event in found["b"])
    timed = [event for event in found["a"] if isinstance(event, Timed)]
    steps = [step for event in timed for step in event.steps]
    tokens = [event for event in found["a"] if isinstance(event, Tokens)]
    assert [len(event.steps) for event in timed] == [len(event.token_ids) for event in tokens]
    assert len(steps) == sum(len(event.token_ids) for event in tokens) == 20
    assert [type(event) for event in found["a"]] == [Timed, Tokens] * len(tokens) + [Finished]
    assert all(0 <= step.waited <= step.elapsed for step in steps)
    assert {step.batch_size for step in steps} == {2}
    finished = found["a"][-1]
    assert steps[0].waited == finished.queue_time
    core.close()
