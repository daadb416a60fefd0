"""Routing by prefix in simulated time, on the real replica sets of several gateways."""

from __future__ import annotations

import affinity
import pytest


@pytest.mark.parametrize("skew", [0.0, 0.5])
def test_four_engines_reuse_prefixes_like_one(skew: float) -> None:
    """Four engines reach 0.9 of the hit rate of one with their memory together, and a fifth of the 90th percentile of
    the time to the first token of round robin, and none has 1.3 times the mean load, also if half of the requests have
    one prefix.
    """
    load = affinity.Load(requests=4000, skew=skew)
    one, four, rotated = (
        affinity.simulate(load, engines, 1_200_000, round_robin=in_turn)
        for engines, in_turn in ((1, False), (4, False), (4, True))
    )
    assert four.hit_rate >= 0.9 * one.hit_rate
    assert four.ttft_p90 <= 0.2 * rotated.ttft_p90
    assert four.busiest <= 1.3
