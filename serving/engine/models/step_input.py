"""The input of one forward pass, whichever code computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..adapters.virtual_tokens import VirtualTokens
from ..attention.kv_cache import Row


class StepInput(NamedTuple):
    """A flat row of tokens: ``ids`` int64, made up of ``rows`` one after the other, each with its adapter.

    Logits are wanted at the places ``kept`` of the flat row. ``virtual``: the ids outside the vocabulary, and the
    vectors that they stand for.
    """

    ids: Any
    rows: Sequence[Row]
    adapters: Sequence[str | None]
    kept: Sequence[int]
    virtual: VirtualTokens | None = None
