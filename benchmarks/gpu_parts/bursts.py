"""Bursts of requests in an engine of this process, and the times of their steps."""

from __future__ import annotations

import gc
import threading
import time
from itertools import count
from typing import Any

from mlflow_llm.serving.engine.cores.generation_core import GenerationCore
from mlflow_llm.serving.interface.events import Failed, Tokens
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest

from .floor import free, synchronize
from .inputs import prompts
from .plan import Plan, Record


class Engine:
    """An engine of the plan's model. Requests share no prefixes, since none has a cache salt."""

    def __init__(self, plan: Plan, **settings: Any) -> None:
        began = time.perf_counter()
        self.device = plan.device
        self.core = GenerationCore(plan.bundle(), plan.settings(**settings))
        self.start_seconds = time.perf_counter() - began
        self._came = threading.Event()
        self.core.on_work(self._came.set)
        self._numbers = count()
        self._first = 0

    def close(self) -> None:
        """End the engine and give back the device's memory, which another may need."""
        self.core.close()
        del self.core
        gc.collect()
        free(self.device)

    def described(self, by: str) -> Record:
        """Return what the engine runs, and the reasons for what it does not."""
        info = self.core.info
        paged = info.paged
        assert paged is not None
        reasons = (
            paged.attention_reason, paged.prefill_reason, paged.cuda_graphs_reason, paged.async_scheduling_reason,
            info.quantization_reason,
        )  # fmt: skip
        return {
            "part": "engine", "by": by, "start_seconds": self.start_seconds, "attention": paged.attention,
            "prefill": paged.prefill, "graphs": [] if paged.cuda_graphs_reason else list(paged.cuda_graphs),
            "ahead": paged.async_scheduling, "reasons": [reason for reason in dict.fromkeys(reasons) if reason],
        }  # fmt: skip

    def add(self, size: int, length: int, new: int, adapters: tuple[str, ...] = (), **fields: Any) -> None:
        """Add ``size`` requests of ``new`` tokens, greedy unless ``fields`` say otherwise."""
        for place, prompt in enumerate(prompts(self.core.info.vocab_size, size, length, self._first)):
            number = next(self._numbers)
            request = ValidRequest(
                request_id=f"r{number}", task="completions", model="m",
                sequences=(Sequence(prompt_token_ids=prompt, seed=number),),
                sampling=Sampling(**{"max_tokens": new, "temperature": 0.0} | fields),
                adapter=adapters[place % len(adapters)] if adapters else None,
            )  # fmt: skip
            self.core.add(request)
        self._first += size

    def step(self) -> int:
        """Run a step and return its number of tokens. Raises ``RuntimeError`` if a request fails."""
        tokens = 0
        for _, request_id, event in self.core.step():
            if isinstance(event, Failed):
                raise RuntimeError(f"{request_id}: {event.param or event.kind}: {event.message}")
            tokens += len(event.token_ids) if isinstance(event, Tokens) else 0
        return tokens

    def prefill(self, size: int, length: int) -> float:
        """Return the seconds in which ``size`` prompts are computed."""
        self.add(size, length, 2)
        seconds = self.until_decoding()
        self.drain()
        return seconds

    def until_decoding(self) -> float:
        scheduler = self.core.parts.scheduler
        began = time.perf_counter()
        while any(not sequence.decodes for sequence in scheduler.running) or scheduler.waiting or self.core.waits:
            self._await_work()
            self.step()
        synchronize(self.device)
        return time.perf_counter() - began

    def _await_work(self) -> None:
        """Wait while requests wait for their grammars, as the loop around an engine does."""
        self._came.clear()
        if not self.core.has_work() and self.core.waits:
            self._came.wait(60)

    def decode(self, size: int, length: int, new: int, **fields: Any) -> float:
        """Return the median seconds of a step in which all ``size`` sequences decode."""
        self.add(size, length, new, **fields)
        self.until_decoding()
        times = []
        while self.core.has_work():
            before, began = len(self.core.parts.scheduler.running), time.perf_counter()
            self.step()
            if before == size:
                times.append(time.perf_counter() - began)
        if not times:
            raise RuntimeError(f"no step with all {size} sequences: texts ended, or there is no room for them")
        return sorted(times)[len(times) // 2]

    def rate(self, size: int, length: int, new: int) -> float:
        """Return tokens per second of whole requests, from their being added to the end of the last."""
        began = time.perf_counter()
        self.add(size, length, new)
        tokens = self.drain()
        return tokens / (time.perf_counter() - began)

    def steps(self, times: int) -> None:
        for _ in range(times):
            self.step()

    def abandon(self) -> None:
        """Abort what runs after a failure, so that the next burst runs alone."""
        scheduler = self.core.parts.scheduler
        for sequence in (*scheduler.running, *scheduler.waiting):
            self.core.abort(sequence.group.request.request_id)
        while self.core.has_work() or self.core.waits:
            self._await_work()
            self.core.step()

    def drain(self) -> int:
        """Run all requests to their ends; return their tokens."""
        tokens = 0
        while self.core.has_work():
            tokens += self.step()
        return tokens
