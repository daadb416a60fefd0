"""The context of a forward pass for attention and LoRA layers: plans over the flat row of tokens.

All modules of a model hold the same ``ContextHolder``. Whatever runs a forward sets the context before it and removes
it afterwards. (vLLM's forward context is a module-level global, which would tie two engines in a process together.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class ForwardContext:
    """The context of a forward over a flat row of ``num_tokens``. ``attention`` is the KV cache's plan, ``lora`` the
    adapter pool's (None if no adapter is active). ``rotation``: queries and keys between a layer's rotary embeddings,
    which a plan with ``attend_rotated`` computes, and its attention."""

    num_tokens: int
    attention: Any = None
    lora: Any = None
    rotation: Any = None


class ContextHolder:
    """The holder of the ``context`` of the running forward; None between forwards."""

    __slots__ = ("context",)

    def __init__(self) -> None:
        self.context: ForwardContext | None = None
