"""The configs of endpoints, each version read once: a version never changes, and the controller asks at every tick."""

from __future__ import annotations

from ..endpoints.config import EndpointConfig
from ..endpoints.store import EndpointState, EndpointStore
from ..interface.errors import NotFound


class KnownConfigs:
    """The configs that were asked for since the last ``begin``, or in the round before it."""

    def __init__(self, endpoints: EndpointStore) -> None:
        self._endpoints = endpoints
        self._known: dict[tuple[str, int], EndpointConfig] = {}
        self._before: dict[tuple[str, int], EndpointConfig] = {}

    def begin(self) -> None:
        """Begin a round; what nobody asked for in the last one is forgotten."""
        self._before, self._known = self._known, {}

    def of(self, state: EndpointState, version: int) -> EndpointConfig | None:
        """Return config ``version`` of an endpoint; None if it has just been deleted. Raises ``Unavailable``."""
        place = (state.id, version)
        found = self._known.get(place) or self._before.get(place)
        if found is None:
            try:
                found = self._endpoints.config(state.name, version)
            except NotFound:
                return None
        self._known[place] = found
        return found
