"""The flat row of tokens that one forward runs, as the attention function and the LoRA layers see it.

Every module of one model holds the same ``StepHolder``; the runner puts the step in before a forward. A module-level
global would tie two engines in one process together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Step:
    """``attention`` is the KV cache's plan for this row, ``lora`` the pool's (None: no adapter is active)."""

    num_tokens: int
    attention: Any = None
    lora: Any = None


class StepHolder:
    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step: Step | None = None
