"""The things that a request awaits before its sequences may run: its images, and its grammar."""

from __future__ import annotations

from dataclasses import dataclass

from ..constraints.grammars import Compilation
from .sequence import WaitReason


@dataclass(slots=True)
class Prerequisites:
    """The prerequisites of one request that are not met: ``images`` to be encoded, a ``grammar`` to be compiled.

    ``compilation`` is that of its grammar, if it has one, awaited or done."""

    images: bool = False
    grammar: bool = False
    compilation: Compilation | None = None

    @property
    def are_met(self) -> bool:
        return not (self.images or self.grammar)

    @property
    def wait_reason(self) -> WaitReason:
        """Return what the request's sequences wait for next; their turn if everything is there."""
        if self.images:
            return "images"
        return "grammar" if self.grammar else "turn"
