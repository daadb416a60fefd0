"""How many replicas a served entity should have: a pure function of the observed load, called every few seconds.

It scales up at once and down slowly: a missing replica causes a queue, while one too many costs little for a minute.
"""

from __future__ import annotations

import math

from msgspec import Struct


class ScalePolicy(Struct, frozen=True, kw_only=True):
    """The limits of a served entity's scaling. Throughputs are in tokens/s, ``per_replica`` is that of one replica.

    There are enough replicas for ``min_throughput``, but never more than ``max_throughput`` needs or than
    ``replica_limit``, for which the machine has room. Between ``low`` and ``high`` (shares of the capacity in use)
    nothing changes; after ``settle_seconds`` below ``low``, one replica is removed; with ``scale_to_zero``, the last
    one is removed after ``idle_seconds`` without a request.
    """

    per_replica: int
    min_throughput: int
    max_throughput: int
    replica_limit: int = 64
    scale_to_zero: bool = False
    high: float = 0.8
    low: float = 0.5
    settle_seconds: float = 60.0
    idle_seconds: float = 300.0

    @property
    def min_replicas(self) -> int:
        return min(self.replica_limit, max(1, math.ceil(self.min_throughput / self.per_replica)))

    @property
    def max_replicas(self) -> int:
        return max(self.min_replicas, min(self.replica_limit, math.ceil(self.max_throughput / self.per_replica)))


class Load(Struct, frozen=True, kw_only=True):
    """The load: ``tokens_per_second`` is the recent demand, ``waiting`` and ``running`` count current requests."""

    tokens_per_second: float
    waiting: int = 0
    running: int = 0

    @property
    def idle(self) -> bool:
        return self.tokens_per_second == 0 and not self.waiting and not self.running


class ScaleState(Struct, frozen=True, kw_only=True):
    """The state between decisions. ``low_since`` (``idle_since``), seconds, is None unless the load is low (idle)."""

    replicas: int
    low_since: float | None = None
    idle_since: float | None = None


def decide(policy: ScalePolicy, state: ScaleState, load: Load, now: float) -> ScaleState:
    """Return the next state; its ``replicas`` is how many there should be. ``now`` is in monotonic seconds."""
    if load.idle:
        return _idle(policy, state, now)
    wanted = max(policy.min_replicas, math.ceil(load.tokens_per_second / (policy.per_replica * policy.high)))
    if load.waiting and state.replicas:
        wanted = max(wanted, state.replicas + 1)  # there is a queue: the demand exceeds what was generated
    wanted = min(wanted, policy.max_replicas)
    if wanted > state.replicas:
        return ScaleState(replicas=wanted)
    return _shrink(policy, state, load.tokens_per_second, now, idle_since=None)


def _idle(policy: ScalePolicy, state: ScaleState, now: float) -> ScaleState:
    since = now if state.idle_since is None else state.idle_since
    if policy.scale_to_zero and now - since >= policy.idle_seconds:
        return ScaleState(replicas=0, idle_since=since)
    if state.replicas == 0 and policy.scale_to_zero:
        return ScaleState(replicas=0, idle_since=since)
    if state.replicas < policy.min_replicas:
        return ScaleState(replicas=policy.min_replicas, idle_since=since)
    return _shrink(policy, state, 0.0, now, idle_since=since)


def _shrink(policy: ScalePolicy, state: ScaleState, demand: float, now: float, idle_since: float | None) -> ScaleState:
    """Remove one replica when the others would have been below ``low`` for long enough.

    ``low`` < ``high`` keeps the replica from being added again at once.
    """
    if state.replicas > policy.max_replicas:
        return ScaleState(replicas=policy.max_replicas, idle_since=idle_since)
    rest = (state.replicas - 1) * policy.per_replica
    if state.replicas <= policy.min_replicas or demand > rest * policy.low:
        return ScaleState(replicas=state.replicas, idle_since=idle_since)
    since = now if state.low_since is None else state.low_since
    if now - since < policy.settle_seconds:
        return ScaleState(replicas=state.replicas, low_since=since, idle_since=idle_since)
    return ScaleState(replicas=state.replicas - 1, low_since=now, idle_since=idle_since)
