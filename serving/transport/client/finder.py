"""The protocol by which a client finds its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Finder(Protocol):
    """A finder of an engine: ``Launcher`` starts one if there is none, ``Attacher`` waits for one.

    ``secret`` is the key of an engine on another host."""

    client_id: str
    generation: str  # of the engine that was found last
    secret: bytes | None
    failed_log: str  # the log of the last engine whose start failed; "" for a finder that starts none

    def find(self, stalled: str, cancelled: Callable[[], bool]) -> str:
        """Return the endpoint of a ready engine.

        ``stalled`` is the generation of a stalled engine to replace, or ""; ``cancelled`` is called often. Raises
        ``PackagingError``, ``ServingError``, or an OSError, which may be transient.
        """
        ...

    def alive(self) -> bool: ...
    def close(self) -> None: ...
