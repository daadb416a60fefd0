"""How many hosts an engine should have by its load, between the ``min`` and ``max`` of its entity's ``scale``."""

from __future__ import annotations

from ...endpoints.scale import Scale
from ...supervision.supervisor import EngineStatus
from ..scaling import Load, ScalePolicy, ScaleState, decide


class HostCount:
    """The number of hosts of one engine. ``there`` is how many it has when a leader begins to count.

    The load is the sequences that run and wait in its replicas, of all gateways, against those that run at once in one
    (``max_num_seqs``). While hosts that were asked for are not ready yet, a queue asks for no more.
    """

    def __init__(self, there: int, *, settle_seconds: float = 60.0) -> None:
        self._state = ScaleState(replicas=there)
        self._settle_seconds = settle_seconds

    def look(self, scale: Scale, status: EngineStatus | None, now: float) -> int:
        """Return how many hosts there should be; ``now`` is in monotonic seconds."""
        bounded = min(max(self._state.replicas, scale.min), scale.most)
        if bounded != self._state.replicas:
            self._state = ScaleState(replicas=bounded)
        if status is None or status.info is None or scale.min == scale.most:
            return bounded
        each = status.info.max_num_seqs
        running = sum(one.health.num_running for one in status.replicas)
        waiting = sum(one.health.num_waiting for one in status.replicas)
        policy = ScalePolicy(
            per_replica=each,
            min_throughput=scale.min * each,
            max_throughput=scale.most * each,
            settle_seconds=self._settle_seconds,
        )
        is_complete = len(status.ready) >= bounded
        load = Load(tokens_per_second=running + waiting, waiting=waiting if is_complete else 0, running=running)
        self._state = decide(policy, self._state, load, now)
        return self._state.replicas
