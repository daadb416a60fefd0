"""Write the engine's counters to the files from which servers on this host read them."""

from __future__ import annotations

import logging
from pathlib import Path

from ...interface.engine import Health
from ...system.shared_counters import COUNTERS, CountsFile

logger = logging.getLogger(__name__)


class CounterWriter:
    """The counter files of this process, named after its ``generation``.

    A file that cannot be written is logged and left out, and serving continues.
    """

    def __init__(self, generation: str) -> None:
        self._generation = generation
        self._files: dict[str, CountsFile | None] = {}

    def keep(self, roots: set[str], health: Health) -> None:
        """Write to one file in each of the directories ``roots`` from now on; "" stands for no directory."""
        for gone in self._files.keys() - roots:
            file = self._files.pop(gone)
            if file is not None:
                file.close()
        for root in roots - self._files.keys() - {""}:
            self._files[root] = self._open(root)
        self.write(health)

    def write(self, health: Health) -> None:
        """Store the counters of ``health`` in all files; called once per step."""
        if not self._files:
            return
        counts = [getattr(health, name) for name in COUNTERS]
        for file in self._files.values():
            if file is not None:
                file.put(counts)

    def _open(self, root: str) -> CountsFile | None:
        try:
            return CountsFile(Path(root), self._generation)
        except OSError:
            logger.exception("counters cannot be stored in %s", root)
            return None
