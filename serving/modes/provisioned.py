"""Provisioned throughput: tokens/s reserved for an endpoint, paid by the minute, used first.

A request within the reserve runs before every pay-per-token request and keeps its speed next to them
(``engine.best_effort``). A request beyond the reserve is not refused, but runs among them as best effort. The reserve
is a bucket in the metering store, so that all workers and hosts draw from the same one.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from ..interface.errors import InvalidField
from ..interface.labels import NONE, Labels
from ..interface.request import ValidRequest
from ..metering.accounts.keys import Caller
from ..metering.ledger.lease import Bucket
from ..metering.ledger.ledger import Ledger
from ..metering.proof.answers import Asked
from .base import Admission, ModeProfile, Target, reservation_of
from .calibration import Capacity


class Measured(Struct, frozen=True, kw_only=True):
    """The calibration of a provisioned entity: tokens/s of one replica, the cost of a prompt token in thousandths of a
    generated token, and for how many replicas the machine has CPUs."""

    tokens_per_second: int
    prompt_weight_milli: int
    replica_limit: int


PROFILE = ModeProfile(name="provisioned", accepts_n=True, accepts_error_behavior=False, reserves=True)


class Provisioned:
    """Provisioned throughput: ``throughput`` is the reserved tokens/s of one served entity over all its replicas."""

    def __init__(self, ledger: Ledger, *, throughput: int, prompt_weight_milli: int = 1000) -> None:
        if throughput < 1:
            raise InvalidField("min_provisioned_throughput", throughput, "at least 1 token/s to admit by")
        self._ledger = ledger
        self._bucket = Bucket(rate=throughput, prompt_weight_milli=prompt_weight_milli)

    @property
    def profile(self) -> ModeProfile:
        return PROFILE

    def admit(
        self,
        valid: ValidRequest,
        caller: Caller,
        target: Target,
        labels: Labels = NONE,
        asked: Asked | None = None,
    ) -> Admission:
        reservation = reservation_of(valid, caller, target, PROFILE.name, labels, self._bucket, asked=asked)
        lease = self._ledger.reserve(reservation)
        if lease.within_reserve and not valid.background:
            valid = msgspec.structs.replace(valid, provisioned=True)
        return Admission(lease, valid)


def reserved_units(per_replica: int, maximum: int, replicas: int) -> int:
    """Return the tokens/s that ``replicas`` reserve, for requests and on the bill: all they give, up to the maximum."""
    return min(maximum, per_replica * replicas)


def check_throughput(
    minimum: int, maximum: int | None, capacity: Capacity | None = None, *, max_replicas: int = 1
) -> None:
    """Raise ``InvalidField`` for a range that is invalid or, if ``capacity`` is measured, exceeds the machine.

    If ``maximum`` is None, only the minimum was given, and it is also the maximum.
    """
    if minimum < 0:
        raise InvalidField("min_provisioned_throughput", minimum, "a number of tokens/s that is not negative")
    if maximum is None and minimum < 1:
        allowed = "at least 1 token/s, unless max_provisioned_throughput is given too"
        raise InvalidField("min_provisioned_throughput", minimum, allowed)
    if maximum is not None and maximum < max(1, minimum):
        raise InvalidField("max_provisioned_throughput", maximum, f"at least {max(1, minimum)} tokens/s")
    if capacity is None:
        return
    can = capacity.decode_tokens_per_second * max_replicas
    measured = f"at most {can} tokens/s: what {max_replicas} replica(s) were measured to give"
    if minimum > can:
        raise InvalidField("min_provisioned_throughput", minimum, measured)
