"""What a chat template reads of a request: what it does not read would be ignored, and is refused instead."""

from __future__ import annotations

from ..confined import POOL, render_limits


class TemplateReads:
    """``variables`` are the names that ``source`` takes from outside, None where it cannot be told.

    Raises what ``confined.Pool.run`` does.
    """

    def __init__(self, source: str) -> None:
        self.tool_calls = "tool_calls" in source
        found = POOL.run("reads", render_limits(len(source), None), source=source)
        self.variables: frozenset[str] | None = None if found is None else frozenset(found)
