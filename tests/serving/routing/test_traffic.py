"""Traffic is split over served entities by percentage, and sticky callers stay where they are."""

from __future__ import annotations

from collections import Counter

import pytest

from mlflow_llm.serving.endpoints.config import Route
from mlflow_llm.serving.routing.traffic import TrafficSplit

ROUTES = (
    Route(served_model_name="a", traffic_percentage=80),
    Route(served_model_name="b", traffic_percentage=0),
    Route(served_model_name="c", traffic_percentage=13),
    Route(served_model_name="d", traffic_percentage=7),
)


@pytest.mark.parametrize("start", [0, 1, 2**63, 2**64 - 1, 0xDEADBEEF])
def test_traffic_is_split_within_one_percent(start: int) -> None:
    """Over 10,000 requests each share is within 1 % of its percentage, and 0 % gets none."""
    split = TrafficSplit("chat", ROUTES, start=start)
    counts = Counter(split.choose() for _ in range(10_000))
    for route in ROUTES:
        assert abs(counts[route.served_model_name] - 100 * route.traffic_percentage) < 100
    assert counts["b"] == 0


def test_a_sticky_caller_stays_with_its_entity() -> None:
    """A sticky caller gets the same entity in every worker, and over many callers the split is within 1 %."""
    one, other = (TrafficSplit("chat", ROUTES, start=start) for start in (1, 2))
    chosen = {f"key_{number}": one.choose(f"key_{number}") for number in range(10_000)}
    assert chosen == {key: other.choose(key) for key in chosen}
    counts = Counter(chosen.values())
    for route in ROUTES:
        assert abs(counts[route.served_model_name] - 100 * route.traffic_percentage) < 100
