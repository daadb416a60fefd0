from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlflow_llm.serving.control.scaling import Load, ScalePolicy, ScaleState, decide

POLICY = ScalePolicy(per_replica=100, min_throughput=150, max_throughput=500, settle_seconds=60, idle_seconds=300)
TO_ZERO = ScalePolicy(per_replica=100, min_throughput=50, max_throughput=500, scale_to_zero=True)


def test_load_adds_replicas_at_once():
    """Load adds enough replicas to keep each below its high mark, up to the maximum; a queue adds one more."""
    assert decide(POLICY, ScaleState(replicas=2), Load(tokens_per_second=300), 0).replicas == 4
    assert decide(POLICY, ScaleState(replicas=2), Load(tokens_per_second=9000), 0).replicas == 5
    assert decide(POLICY, ScaleState(replicas=3), Load(tokens_per_second=10, waiting=4), 0).replicas == 4


def test_replicas_go_one_by_one_after_a_while():
    """Replicas are removed one at a time, and only if the rest would have been well under load for the whole period."""
    state, low = ScaleState(replicas=4), Load(tokens_per_second=90, running=1)
    state = decide(POLICY, state, low, 0)
    state = decide(POLICY, state, low, 59)
    assert state.replicas == 4
    assert decide(POLICY, state, Load(tokens_per_second=200), 59.5).low_since is None
    state = decide(POLICY, state, low, 60)
    assert state.replicas == 3
    state = decide(POLICY, state, low, 120)
    assert decide(POLICY, state, low, 10_000).replicas == 2  # the minimum throughput needs two


def test_scale_to_zero_and_back():
    """After a long enough idle time there is no replica; the first request brings the minimum back at once."""
    state = ScaleState(replicas=1)
    for now in (0, 299):
        state = decide(TO_ZERO, state, Load(tokens_per_second=0), now)
    assert state.replicas == 1
    state = decide(TO_ZERO, state, Load(tokens_per_second=0), 300)
    assert state.replicas == 0
    assert decide(TO_ZERO, state, Load(tokens_per_second=0), 9000).replicas == 0
    assert decide(TO_ZERO, state, Load(tokens_per_second=0, waiting=1), 9001).replicas == 1
    assert decide(POLICY, ScaleState(replicas=0), Load(tokens_per_second=0), 0).replicas == 2


@given(
    loads=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 3), st.integers(1, 400)), max_size=40),
    zero=st.booleans(),
)
def test_replicas_stay_within_their_bounds(loads, zero):
    """At any load the number of replicas is between minimum and maximum, unless an idle entity is scaled to zero."""
    policy, state, now = TO_ZERO if zero else POLICY, ScaleState(replicas=2), 0.0
    for tokens, waiting, seconds in loads:
        now += seconds
        load = Load(tokens_per_second=tokens, waiting=waiting)
        state = decide(policy, state, load, now)
        assert state.replicas <= policy.max_replicas
        assert state.replicas >= policy.min_replicas or (zero and load.idle)


def test_a_steady_load_does_not_flap():
    """A constant load settles on one number of replicas from any start."""
    for tokens in range(0, 500, 7):
        state, seen = ScaleState(replicas=5), []
        for now in range(0, 3000, 10):
            state = decide(POLICY, state, Load(tokens_per_second=tokens, running=1), now)
            seen.append(state.replicas)
        assert seen == sorted(seen, reverse=True)
