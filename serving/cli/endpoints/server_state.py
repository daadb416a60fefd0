"""The state of a server's endpoints, read from the routes that tell parts of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import click

from ...http.management.paths import SERVING_ENDPOINTS
from ..http import Client
from .exposition import EngineNumbers, Place, engine_numbers

METRICS = "/metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The engines' numbers at a time, in seconds of the monotonic clock; ``refused`` says why there are none."""

    at: float
    engines: dict[Place, EngineNumbers] = field(default_factory=dict)
    refused: str = ""

    def rate(self, before: Sample, place: Place) -> float | None:
        """Return the tokens generated a second since ``before``; None if one of the samples lacks the engine."""
        return self.per_second(before, place, lambda one: one["generated_tokens"])

    def prefill_rate(self, before: Sample, place: Place) -> float | None:
        """Return the prompt tokens a second of the requests that ended since ``before``, without cached ones."""
        return self.per_second(before, place, EngineNumbers.prompt_tokens)

    def per_second(self, before: Sample, place: Place, read: Any) -> float | None:
        if place not in self.engines or place not in before.engines or self.at <= before.at:
            return None
        more = read(self.engines[place]) - read(before.engines[place])
        return float(max(0.0, more) / (self.at - before.at))


def sample(client: Client) -> Sample:
    """Read the engines' numbers. Of a server that does not show its metrics here, there are none."""
    try:
        with client.understood():
            return Sample(engines=engine_numbers(client.get_text(METRICS)), at=time.monotonic())
    except click.ClickException as error:
        return Sample(refused=error.message, at=time.monotonic())


def states(client: Client) -> dict[str, Any]:
    """Return the health of every endpoint by name."""
    try:
        found: dict[str, Any] = client.get("/health").get("endpoints", {})
    except click.ClickException:  # 503: an engine stands still, and says no more here
        return {}
    return found


def managed(client: Client) -> dict[str, dict[str, Any]]:
    """Return the endpoints of the management API by name, as far as the key may see them."""
    with client.understood():
        return {one["name"]: one for one in client.get(SERVING_ENDPOINTS)["endpoints"]}
