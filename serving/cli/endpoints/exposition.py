"""Read the parts of ``/metrics`` that are about engines and tokens (Prometheus' text format)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "mlflow_llm_"
_ENGINE = (
    "engine_memory_bytes", "engine_ready", "generated_tokens", "kv_tokens_total", "kv_tokens_used", "prefix_hit_tokens",
    "prefix_query_tokens", "replicas", "running_sequences", "waiting_requests", "waiting_tenants",
)  # fmt: skip

Place = tuple[str, str]  # endpoint, served entity


@dataclass(slots=True)
class EngineNumbers:
    """The numbers of one served entity. ``tokens`` are those of its requests by (adapter, kind), so far."""

    values: dict[str, float] = field(default_factory=dict)
    tokens: dict[tuple[str, str], float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.values.get(name, 0.0)

    def prompt_tokens(self) -> float:
        """Return the prompt tokens that were computed, so far: those that the cache held are not among them."""
        kinds = {kind: sum(n for (_, one), n in self.tokens.items() if one == kind) for kind in ("prompt", "cached")}
        return kinds["prompt"] - kinds["cached"]


def engine_numbers(text: str) -> dict[Place, EngineNumbers]:
    """Return the numbers by endpoint and served entity. Raises ``ValueError`` for a text that is not an exposition."""
    found: dict[Place, EngineNumbers] = {}
    for name, labels, value in samples(text):
        if "endpoint" not in labels or "entity" not in labels:
            continue
        place = (labels["endpoint"], labels["entity"])
        name = name if name in _ENGINE else name.removesuffix("_total")  # which counters have, and one of our gauges
        if name in _ENGINE:
            found.setdefault(place, EngineNumbers()).values[name] = value
        elif name == "tokens" and place[0]:
            key = (labels.get("adapter", ""), labels.get("kind", ""))
            found.setdefault(place, EngineNumbers()).tokens[key] = value
    return {place: numbers for place, numbers in found.items() if numbers.values}


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield (name without our prefix, labels, value) of our metrics. Raises ``ValueError``."""
    ours = [line for line in text.splitlines(keepends=True) if line.startswith(PREFIX)]
    try:
        found = [sample for family in text_string_to_metric_families("".join(ours)) for sample in family.samples]
    except (ValueError, IndexError) as error:
        raise ValueError(f"{''.join(ours)[:80]!r} begins with what is not a sample: {error}") from None
    for sample in found:
        yield sample.name.removeprefix(PREFIX), sample.labels, sample.value
