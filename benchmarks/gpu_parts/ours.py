"""Prompts, decode steps and features of requests in our engine, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from statistics import median
from typing import Any

from mlflow_llm.serving.interface.constraint import Grammar

from .bursts import Engine
from .floor import copy_speed, free, matrix_rate
from .inputs import ADAPTERS
from .kernels import profiles
from .plan import Plan, Record

SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 10_000}  # no text ends by itself
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature, top_p, top_k": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "5 log probabilities": {"logprobs": 5},
}
GRAMMAR, MIXED = "JSON grammar", f"{len(ADAPTERS)} adapters"


def run(plan: Plan) -> Iterator[Record]:
    """Yield the figures of the plan's parts ``prefill``, ``decode``, ``features`` and ``profile``."""
    by = plan.by
    if by == "ours":
        yield {"part": "device", "copies": copy_speed(plan.device), "matrix": matrix_rate(plan.device)}
        free(plan.device)
    with closing(Engine(plan)) as engine:
        yield engine.described(by)
        if "prefill" in plan.parts:
            for count, length in plan.prefills:
                times = [engine.prefill(count, length) for _ in range(1 + plan.rounds)][1:]  # the first warms up
                yield {"part": "prefill", "by": by, "count": count, "length": length, "seconds": median(times)}
        if "decode" in plan.parts:
            for count in plan.sequences:
                yield {"part": "decode", "by": by, "count": count, "seconds": step_of(plan, engine, count)}
        if "features" in plan.parts:
            yield from features(plan, engine)
        if "profile" in plan.parts:
            yield from profiles(plan, engine)


def step_of(plan: Plan, engine: Engine, count: int, **fields: Any) -> float:
    return engine.decode(count, plan.prompt, plan.new, **fields)


def features(plan: Plan, engine: Engine) -> Iterator[Record]:
    """Yield the step of each feature. One that fails is a record with its error."""
    grammar: dict[str, Any] = {}
    try:
        from llguidance import LLMatcher

        source = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
        grammar[GRAMMAR] = {"grammar": Grammar(source=source, field="grammar", fast_forward=False)}
    except ImportError:
        yield {"part": "features", "feature": GRAMMAR, "count": plan.batch, "error": "llguidance is not installed"}
    for name, fields in (FEATURES | grammar | {MIXED: {"adapters": ADAPTERS}}).items():
        record: Record = {"part": "features", "feature": name, "count": plan.batch}
        try:
            for adapter in fields.get("adapters", ()):
                engine.core.load_adapter(adapter, str(plan.adapters_dir / adapter))
            record["seconds"] = step_of(plan, engine, plan.batch, **fields)
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}"[:300]
            engine.abandon()
        yield record
