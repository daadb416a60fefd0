"""Helpers that run an engine core to the end and gather its events, and sequences without a core."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from tiny_models import VOCAB

from mlflow_llm.serving.engine.attention.kv_cache import PrefixKey
from mlflow_llm.serving.engine.constraints.logits_processors import LogitsProcessors
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.scheduling.sequence import SequenceGroup, SequenceState
from mlflow_llm.serving.interface.events import (
    DraftCounts,
    Failed,
    Finished,
    Logits,
    PromptScored,
    TokenLogprob,
    Tokens,
)
from mlflow_llm.serving.interface.request import LogitsOf, ValidRequest

TOKEN_BYTES = 2 * 2 * 8 * 2 * 4  # of the tiny Llama's KV: layers, heads, head width, K and V, float32


@dataclass
class Outcome:
    """The events of a request; ``tokens`` and ``finished`` are by sequence index."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=lambda: defaultdict(list))
    scored: dict[int, PromptScored] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    failed: Failed | None = None
    drafts: dict[int, DraftCounts] = field(default_factory=dict)  # with the last tokens that had any
    rows: dict[tuple[LogitsOf, int], list[Logits]] = field(default_factory=lambda: defaultdict(list))

    def logits(self, of: LogitsOf, index: int = 0, *, first: int = 0) -> npt.NDArray[np.float32]:
        """Return [rows, V], after checking that they came in order from row ``first`` on."""
        for event in self.rows[of, index]:
            assert event.start == first
            first += event.num_rows
        parts = [np.frombuffer(e.data, dtype="<f4").reshape(e.num_rows, -1) for e in self.rows[of, index]]
        return np.concatenate(parts) if parts else np.empty((0, VOCAB), dtype=np.float32)


@contextlib.contextmanager
def checked_cores(make: Callable[..., EngineCore]) -> Iterator[Callable[..., EngineCore]]:
    """Yield ``make``, whose cores are checked and closed at the end: all memory is accounted for, and nothing is
    left."""
    made: list[EngineCore] = []

    def kept(**more: Any) -> EngineCore:
        made.append(make(**more))
        return made[-1]

    yield kept
    for core in made:
        assert core.parts.runner.num_tables == 0
        assert not core.image_features
        core.check_integrity()
        core.close()


def take(core: EngineCore, outcomes: dict[str, Outcome], max_steps: int | None = None) -> dict[str, Outcome]:
    """Step until there is no work, checking that nothing follows an end."""
    steps = 0
    while (core.has_work() or core.waits) and (max_steps is None or steps < max_steps):
        wait_for_work(core)
        for _, request_id, event in core.step():
            outcome = outcomes[request_id]
            assert outcome.failed is None
            if isinstance(event, Failed):
                outcome.failed = event
                continue
            assert event.index not in outcome.finished
            if isinstance(event, Tokens):
                outcome.tokens[event.index].extend(event.token_ids)
                outcome.logprobs[event.index].extend(event.logprobs)
                if event.drafts is not None:
                    outcome.drafts[event.index] = event.drafts
            elif isinstance(event, Logits):
                outcome.rows[event.of, event.index].append(event)
            elif isinstance(event, PromptScored):
                outcome.scored[event.index] = event
            elif isinstance(event, Finished):
                outcome.finished[event.index] = event
        core.check_integrity()
        steps += 1
        assert steps < 5000
    return outcomes


def wait_for_work(core: EngineCore) -> None:
    """Wait while requests wait for their grammars, as the loop around an engine does."""
    came = threading.Event()
    core.on_work(came.set)
    while not core.has_work() and core.waits:
        assert came.wait(240)
        came.clear()


def run(core: EngineCore, *requests: ValidRequest) -> dict[str, Outcome]:
    """Add all requests at once and run to the end."""
    outcomes: dict[str, Outcome] = {r.request_id: Outcome() for r in requests}
    for request in requests:
        core.add(request)
    return take(core, outcomes)


def sequence_of(request: ValidRequest, id: int = 0, *, max_model_len: int = 256) -> SequenceState:
    """Return the first sequence of ``request``, of the base model, as the scheduler and the sampler take it."""
    assert request.sampling is not None
    processors = LogitsProcessors.of(request.sampling)
    group = SequenceGroup(request, request.sampling, PrefixKey("", ""), max_model_len, 0.0, processors=processors)
    return group.add(0, id)
