"""Comparison of the tokenizer that training leaves beside an adapter with its model's.

An adapter's tokenizer is never served. One that makes other tokens of a text than the model's is refused, so that no
answer is silently wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...interface.errors import shown

VOCABULARY = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
PROBES = ("The quick brown fox\n\n jumps over 13 lazy dogs, doesn't it?", " größe 你好 😀", "\tif x:\n    return {}\n")


def has_tokenizer(directory: Path) -> bool:
    """Return whether there is a tokenizer in ``directory``, and not only its settings."""
    return any((directory / file).is_file() for file in VOCABULARY)


def difference(own: Any, model: Any) -> str | None:
    """Return a token that the adapter's ``own`` tokenizer has and the model's has not, or a text of which the two make
    other tokens; None if there is none."""
    wanted, known = own.get_vocab(), model.get_vocab()
    token = min((t for t in wanted if known.get(t) != wanted[t]), key=lambda t: wanted[t], default=None)
    if token is not None:
        there = f"id {known[token]}" if token in known else "no token"
        return f"{shown(token)} is token {wanted[token]} there and {there} here"
    for probe in PROBES:
        if own.encode(probe, add_special_tokens=False) != model.encode(probe, add_special_tokens=False):
            return f"it makes other tokens of {shown(probe)}"
    return None


def other_end(own: Any, model: Any) -> str | None:
    """Return how the ends of texts differ; None if they do not."""
    if own.eos_token == model.eos_token:
        return None
    return f"ends a text with {shown(own.eos_token)}, the model with {shown(model.eos_token)}"
