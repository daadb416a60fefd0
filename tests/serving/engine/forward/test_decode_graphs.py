"""Decode steps over fixed buffers: padded to a size, they give each row what the model's code gives it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import run
from tiny_models import greedy, prompt_of, request_of

from mlflow_llm.serving.engine.attention.kv_cache import PrefixKey, Row
from mlflow_llm.serving.engine.core import EngineCore
from mlflow_llm.serving.engine.forward import decode_graphs
from mlflow_llm.serving.engine.forward.decode_graphs import GraphedForward, sizes_up_to
from mlflow_llm.serving.engine.models.step_input import StepInput
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings


def settings(**more: Any) -> EngineSettings:
    """Return settings for small models in float32, in which tokens equal generate()'s on every device."""
    small = {"max_num_seqs": 6, "kv_cache_memory": 1 << 22, "kv_block_size": 8, "kernels": "torch", "dtype": "float32"}
    return EngineSettings(**{**small, **more})


@pytest.fixture
def core(tiny_bundle: Bundle) -> Iterator[EngineCore]:
    core = EngineCore(tiny_bundle, settings())
    yield core
    core.close()


def test_sizes() -> None:
    """Graph sizes are powers of two up to the max number of sequences, and that number itself."""
    assert [sizes_up_to(n) for n in (1, 2, 6, 64)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16, 32, 64]]


def test_padded_steps_give_the_logits_of_plain_ones(core: EngineCore) -> None:
    """Three rows padded to size 4, after a larger step left its tables, have the logits of the model's own code;
    padding rows write into no sequence's block."""
    cache, forward = core.parts.cache, core.parts.runner.step_forward
    assert isinstance(forward, GraphedForward)
    prompts = [np.array(prompt_of(n, n), dtype=np.int32) for n in (20, 9, 3, 33)]
    with torch.inference_mode():
        for owner, tokens in enumerate(prompts):
            cache.acquire(owner, PrefixKey("", ""), tokens)
            cache.grow(owner, len(tokens) + 1)
            forward.forward(StepInput(tokens.astype(np.int64), [Row(owner, 0, len(tokens))], [None], [len(tokens) - 1]))
        for some in ([0, 1, 2, 3], [1, 2, 0]):
            rows = [Row(owner, len(prompts[owner]), 1) for owner in some]
            ids = np.array([7 + owner for owner in some], dtype=np.int64)
            before = [layer.k.clone() for layer in cache.layers]
            found = forward.forward(StepInput(ids, rows, [None] * len(some), range(len(some))))
            for layer, old in zip(cache.layers, before, strict=True):
                changed = set((layer.k != old).flatten(1).any(1).nonzero().flatten().tolist())
                assert changed <= {0, *(cache.blocks_of(row.owner)[row.start // 8] for row in rows)}
            wanted = forward.plain.forward(StepInput(ids, rows, [None] * len(some), range(len(some))))
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
            assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.fixture
def on_cpu(tiny_bundle: Bundle) -> Iterator[EngineCore]:
    core = EngineCore(tiny_bundle, settings(device="cpu"))
    yield core
    core.close()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the graph functions of ``torch.cuda`` by doubles, and provide their calls in order."""
    done: list[str] = []

    @contextmanager
    def graph(recorded: Any, *, pool: str) -> Iterator[None]:
        done.append(f"record in {pool}")
        yield
        done.append("recorded")

    @contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        done.append("on a side stream")
        yield
        done.append("back")

    make = SimpleNamespace(wait_stream=lambda other: None)
    for name, double in {
        "Stream": lambda device: make,
        "current_stream": lambda device: make,
        "stream": stream,
        "CUDAGraph": SimpleNamespace,
        "graph": graph,
        "graph_pool_handle": lambda: "one pool",
    }.items():
        monkeypatch.setattr(torch.cuda, name, double)
    compute = decode_graphs.RecordedStep.compute

    def noted(self: Any) -> Any:
        done.append(f"compute {self._size}")
        return compute(self)

    monkeypatch.setattr(decode_graphs.RecordedStep, "compute", noted)
    return done


def test_recorded_steps_are_replayed(on_cpu: EngineCore, recorder: list[str]) -> None:
    """Each size is run twice and recorded, the largest first, in one pool; then a step is one replay, and its output
    survives the next replay."""
    core = on_cpu
    cache, forward = core.parts.cache, core.parts.runner.step_forward
    with torch.inference_mode():
        forward.record()
        per_size = [
            "on a side stream",
            "compute {0}",
            "compute {0}",
            "back",
            "record in one pool",
            "compute {0}",
            "recorded",
        ]
        assert recorder == [line.format(size) for size in (6, 4, 2, 1) for line in per_size]
        for step in forward.steps.values():  # a graph computes the same again, into the same memory
            compute = decode_graphs.RecordedStep.compute
            step.graph.replay = functools.partial(lambda step, run: step.logits.copy_(run(step)), step, compute)
        tokens = np.array(prompt_of(9, 0), dtype=np.int32)
        for owner in range(3):
            cache.acquire(owner, PrefixKey("", ""), tokens)
            cache.grow(owner, len(tokens) + 1)
            forward.forward(StepInput(tokens.astype(np.int64), [Row(owner, 0, len(tokens))], [None], [len(tokens) - 1]))
        rows = [Row(owner, len(tokens), 1) for owner in range(3)]
        recorder.clear()
        found, kept = [], []
        for first in (7, 17):
            ids = np.arange(first, first + 3)
            found.append(forward.forward(StepInput(ids, rows, [None] * 3, range(3))))
            kept.append(found[-1].clone())
            wanted = forward.plain.forward(StepInput(ids, rows, [None] * 3, range(3)))
            torch.testing.assert_close(found[-1], wanted, atol=1e-5, rtol=1e-5)
        assert recorder == ["compute 4", "compute 4"]
        assert all(torch.equal(one, other) for one, other in zip(found, kept, strict=True))
        assert not torch.equal(*found)


def test_the_setting_chooses(tiny_bundle: Bundle, tiny_llama: Any) -> None:
    """With "none" every step runs the model's code, and the engine's information gives the reason."""
    core = EngineCore(tiny_bundle, settings(cuda_graphs="none"))
    assert core.info.paged is not None
    assert (core.info.paged.cuda_graphs, core.info.paged.cuda_graphs_reason) == (
        (),
        "the setting cuda_graphs is 'none'",
    )
    assert run(core, request_of("a", prompt_of(9, 0)))["a"].tokens[0] == greedy(tiny_llama, prompt_of(9, 0), 12)
    core.close()


def test_a_model_that_cannot_be_recorded_runs_all_the_same(
    tiny_bundle: Bundle, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If recording fails, steps run the model's code and the reason is kept."""

    def record(self: Any, memory: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(decode_graphs.RecordedStep, "record", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    core = EngineCore(tiny_bundle, settings())
    forward = core.parts.runner.step_forward
    forward.record()
    assert forward.sizes == []
    assert forward.reason == "its code cannot be captured: operation not permitted when stream is capturing"
    assert run(core, request_of("a", prompt_of(9, 0)))["a"].tokens[0] == greedy(tiny_llama, prompt_of(9, 0), 12)
    core.close()
