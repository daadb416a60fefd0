"""Tokens per second of streams over HTTP, from a server of its own, beside the same requests in this process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import median

import msgspec
from load import LlmServe, free_port
from streams import encode

from mlflow_llm.serving.control.settings import ServerSettings
from mlflow_llm.serving.control.spec import EndpointSpec, ServeSpec

from .bursts import Engine
from .callers import MANY, Callers
from .inputs import prompts, vocab_of
from .plan import INSIDE, SERVER, Plan, Record

ROOMY = 12  # CPUs from which on callers have processes of their own


def run(plan: Plan) -> Iterator[Record]:
    """Yield the rates in process, then those of the server, which has the device for itself."""
    with closing(Engine(plan)) as engine:
        engine.rate(2, plan.prompt, 4)
        for count in plan.sequences:
            rates = [engine.rate(count, plan.prompt, plan.new) for _ in range(plan.rounds)]
            yield {"part": "http", "by": INSIDE, "count": count, "rate": median(rates)}
    with tempfile.TemporaryDirectory(prefix="mlg-") as folder, serve(plan, Path(folder)) as server:
        yield {"part": "http", "by": SERVER, "ready_seconds": server.ready_after}
        processes = 4 if (os.cpu_count() or 1) >= ROOMY else 0
        with Callers(server.port, processes) as callers:
            callers.rate(bodies(plan, 0, 2 * MANY, 4), 4)
            first = 2 * MANY
            for count in plan.sequences:
                rates = []
                for _ in range(plan.rounds):
                    rates.append(callers.rate(bodies(plan, first, count, plan.new), plan.new))
                    first += count
                yield {"part": "http", "by": SERVER, "count": count, "rate": median(rates)}


def serve(plan: Plan, root: Path) -> LlmServe:
    port, workers = free_port(), max(1, min(8, (os.cpu_count() or 1) // 2))
    endpoint = EndpointSpec(name="gpu", entity="gpu", bundle=plan.bundle(), engine=plan.settings(idle_timeout=0.3))
    settings = ServerSettings(port=port, workers=workers, log_level="warning")
    (root / "run").mkdir(mode=0o700)
    spec = ServeSpec(endpoints=(endpoint,), settings=settings, runtime_dir=str(root / "run"))
    (root / "spec.json").write_bytes(msgspec.json.encode(spec))
    return LlmServe("--spec", str(root / "spec.json"), port=port, log=root / "log")


def bodies(plan: Plan, first: int, count: int, new: int) -> list[bytes]:
    """Return requests with token ids for prompts, which no tokenizer has to read."""
    common = {"model": "gpu", "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    asked = prompts(vocab_of(plan), count, plan.prompt, first)
    return [encode("/v1/completions", common | {"prompt": list(prompt)}) for prompt in asked]
