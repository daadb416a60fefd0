"""Shadow traffic: a served entity that gets copies of an endpoint's requests, and whose answers nobody gets."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .validated_struct import Checked


class Shadow(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a served entity that gets copies of requests, and no traffic.

    Attributes:
        sample: share of the endpoint's admitted requests that are copied, above 0 and up to 1.
        max_queued: copies that wait in each worker; further ones are dropped, and counted.
        max_concurrent: copies that run at once for each worker.
    """

    sample: Annotated[float, Meta(gt=0, le=1)] = 1.0
    max_queued: Annotated[int, Meta(ge=1, le=10_000)] = 100
    max_concurrent: Annotated[int, Meta(ge=1, le=1000)] = 4
