"""The protocol by which a client finds its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Finder(Protocol):
    """``Launcher`` starts an engine where there is none, ``Attacher`` waits for one.

    ``secret`` is the key of an engine on another host."""

    client_id: str
    generation: str  # of the engine found last
    secret: bytes | None
    failed_log: str  # what the engine wrote whose start failed last; "" where it is not ours to read

    def find(self, stalled: str, cancelled: Callable[[], bool]) -> str:
        """The endpoint of a ready engine. ``stalled`` names the generation that is to be killed first, or is "";
        ``cancelled`` is asked often. Raises ``PackagingError``, ``ServingError``, or OSError, which may pass."""
        ...

    def alive(self) -> bool: ...
    def close(self) -> None: ...
