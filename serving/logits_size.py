"""Logits that a request asks for: how many bytes they are, and what is allowed."""

from __future__ import annotations

from .errors import InvalidField
from .request import ValidRequest

ITEM = 4  # bytes: float32


def logits_size(request: ValidRequest, vocab_size: int) -> tuple[int, int]:
    """Bytes of the context's and of the generation's logits at most, 0 where they are not asked for: a row for each
    token of a prompt, and for each that may be generated."""
    sampling = request.sampling
    if sampling is None or not (sampling.context_logits or sampling.generation_logits):
        return 0, 0
    num_texts = len(request.sequences)
    if sampling.beams is not None:
        num_texts = num_texts // request.n * sampling.beams.width  # all are kept until it is known which are the best
    rows = request.num_prompt_tokens * sampling.context_logits, sampling.max_tokens * num_texts
    return ITEM * vocab_size * rows[0], ITEM * vocab_size * rows[1] * sampling.generation_logits


def check_logits(request: ValidRequest, vocab_size: int, most: int) -> None:
    """Raises ``InvalidField`` for more than ``most`` bytes of logits, which says how many there would be, and for a
    stream of them."""
    context, generation = logits_size(request, vocab_size)
    if not context + generation:
        return
    field = "context_logits" if context >= generation else "generation_logits"
    if request.stream:
        raise InvalidField(field, True, "false with stream: logits come with whole replies alone")
    if context + generation > most:
        rows = max(context, generation) // (ITEM * vocab_size)
        asked = f"{context + generation} bytes, {rows} rows of {vocab_size} numbers among them"
        allowed = f"at most {most} bytes in a request, its context and generation logits together (max_logits_bytes)"
        raise InvalidField(field, asked, allowed)
