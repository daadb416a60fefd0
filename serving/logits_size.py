"""Logits that a request asks for: how many bytes they are, and what is allowed."""

from __future__ import annotations

from .errors import InvalidField
from .request import ValidRequest

ITEM = 4  # bytes: float32


def check_logits(request: ValidRequest, vocab_size: int, most: int) -> None:
    """Raises ``InvalidField`` for more than ``most`` bytes of logits, which say how many there would be: one row for
    each token of a prompt, one for each token that may be generated."""
    sampling = request.sampling
    if sampling is None or not (sampling.context_logits or sampling.generation_logits):
        return
    if request.stream:
        field = "context_logits" if sampling.context_logits else "generation_logits"
        raise InvalidField(field, True, "false with stream: logits come with whole replies alone")
    row = ITEM * vocab_size
    context = row * request.num_prompt_tokens if sampling.context_logits else 0
    num_texts = len(request.sequences)
    if sampling.beams is not None:
        num_texts = num_texts // request.n * sampling.beams.width  # all are kept until it is known which are the best
    generation = row * sampling.max_tokens * num_texts if sampling.generation_logits else 0
    if context + generation > most:
        field, rows = ("context_logits", context) if context >= generation else ("generation_logits", generation)
        asked = f"{context + generation} bytes, {rows // row} rows of {vocab_size} numbers among them"
        allowed = f"at most {most} bytes in a request, its context and generation logits together (max_logits_bytes)"
        raise InvalidField(field, asked, allowed)
