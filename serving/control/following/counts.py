"""The counts that the workers of this gateway keep of canaries, read at most once a second."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from ...interface.canary import EntityCounts
from ...observability.entity_counts import entity_counts

logger = logging.getLogger(__name__)

READ_SECONDS = 1.0  # each reading that differs is written to the store


class CanaryCounts:
    """The counts of served entities by the files of metrics in ``directory``; None is a process without workers."""

    def __init__(self, directory: Path | None, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._monotonic = directory, monotonic
        self._known: dict[tuple[str, str], tuple[float, EntityCounts]] = {}

    def __call__(self, endpoint: str, entity: str) -> EntityCounts:
        """Return the counts of a canary, which may be a second old."""
        read_at, found = self._known.get((endpoint, entity), (-READ_SECONDS, EntityCounts(entity=entity)))
        if self._directory is None or self._monotonic() - read_at < READ_SECONDS:
            return found
        try:
            found = entity_counts(self._directory, endpoint, entity)
        except OSError as error:
            logger.warning("the counts of %s in %s could not be read: %s", entity, endpoint, error)
        self._known[endpoint, entity] = (self._monotonic(), found)
        return found

    def keep_only(self, places: set[tuple[str, str]]) -> None:
        """Forget the canaries that are not among ``places``."""
        self._known = {place: known for place, known in self._known.items() if place in places}
