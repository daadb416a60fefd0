"""What attention and LoRA layers see of one forward beside its tensors: plans over the flat row of tokens.

Every module of one model holds the same ``ContextHolder``; what runs a forward sets the context before it and takes it
away after it. (vLLM's forward context is a module-level global, which would tie two engines in a process together.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class ForwardContext:
    """Of one flat row of ``num_tokens``: ``attention`` is the KV cache's plan, ``lora`` the adapter pool's (None: no
    adapter is active)."""

    num_tokens: int
    attention: Any = None
    lora: Any = None


class ContextHolder:
    """``context`` is that of the forward now running, None between two."""

    __slots__ = ("context",)

    def __init__(self) -> None:
        self.context: ForwardContext | None = None
