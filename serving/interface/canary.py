"""The canary of a served entity that follows an alias: its share of the traffic, its bounds, and what it is judged by.

While a canary runs, the new version is a served entity of its own, called after the one whose place it may take.
"""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta, Struct

from .settings import Seconds
from .validated_struct import Checked

DAYS = 30 * 86_400
MAX_SCORES = 20
# no entity of an operator has a name of this form, since NAME has no tilde
NUMBERED = "~[0-9]+-[0-9a-f]{4}"
NAMED = re.compile(f"(.+){NUMBERED}", re.DOTALL)

Share = Annotated[float, Meta(ge=0, le=1)]
Scores = Annotated[
    dict[str, float],
    Meta(max_length=MAX_SCORES, description=f"at most {MAX_SCORES} names of metrics, each with a number"),
]


class Canary(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of the canary of an entity that follows an alias. Without them, the entity moves at once.

    Attributes:
        traffic_percentage: percent of the entity's traffic that the new version gets while it is judged.
        duration_s: seconds after which the new version gets all of the traffic, unless a bound is broken before.
        min_requests: requests that are counted before a bound on errors or latency is judged; the canary also lasts
            until there are so many.
        max_error_rate: share of the requests that may fail (status 500 and above); null for no bound.
        max_ttft_p95_s: seconds within which 95 % of the streamed requests must get their first token.
        max_tpot_p95_s: seconds per token that 95 % of the streamed requests must keep to.
        min_scores: lower bounds of metrics that MLflow has of the version's logged model or run.
    """

    traffic_percentage: Annotated[int, Meta(ge=1, le=99)] = 10
    duration_s: Annotated[float, Meta(gt=0, le=DAYS)] = 600.0
    min_requests: Annotated[int, Meta(ge=0, le=1_000_000)] = 20
    max_error_rate: Share | None = 0.05
    max_ttft_p95_s: Seconds | None = None
    max_tpot_p95_s: Seconds | None = None
    min_scores: Scores = {}  # noqa: RUF012 - msgspec copies it


class EntityCounts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The requests of a served entity that one gateway, or several together, have answered.

    ``requests`` have ended with a status below 400 or from 500 on; ``errors`` are the latter. What callers did wrong
    (a status of 400 to 499, a disconnect included) is not counted. ``ttft`` and ``tpot`` have the streamed requests by
    the upper limit of their bucket in seconds ("+Inf" for the last), as in the metrics, empty buckets included.
    """

    entity: str = ""
    requests: int = 0
    errors: int = 0
    ttft: dict[str, int] = {}
    tpot: dict[str, int] = {}

    def plus(self, other: EntityCounts) -> EntityCounts:
        """Return the sum of the counts of two gateways."""
        return EntityCounts(
            entity=self.entity or other.entity,
            requests=self.requests + other.requests,
            errors=self.errors + other.errors,
            ttft=_sum(self.ttft, other.ttft),
            tpot=_sum(self.tpot, other.tpot),
        )


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {limit: one.get(limit, 0) + other.get(limit, 0) for limit in one | other}


def canary_name(entity: str, config_version: int, endpoint_id: str) -> str:
    """Return the name of the canary of ``entity`` in a version of its endpoint's config.

    No two canaries share one, so that none is judged by the counts of another: an endpoint may be deleted, and another
    one of its name be created.
    """
    return f"{entity}~{config_version}-{endpoint_id[:4]}"


def base_name(entity: str) -> str | None:
    """Return the entity that a canary is called after; None for an entity that is no canary."""
    found = NAMED.fullmatch(entity)
    return None if found is None else found[1]
