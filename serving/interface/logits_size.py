"""The size in bytes of the logits that a request asks for, and its limit."""

from __future__ import annotations

from .errors import InvalidField
from .request import ValidRequest

ITEM_BYTES = 4  # bytes: float32


def logits_size(request: ValidRequest, vocab_size: int) -> tuple[int, int]:
    """Return the most bytes that the context logits and the generation logits may take, 0 if not asked for.

    There is a row for each prompt token, and for each token that may be generated.
    """
    sampling = request.sampling
    if sampling is None or not (sampling.context_logits or sampling.generation_logits):
        return 0, 0
    num_texts = len(request.sequences)
    if sampling.beams is not None:
        num_texts = num_texts // request.n * sampling.beams.width  # all beams are kept until the best are known
    rows = request.num_prompt_tokens * sampling.context_logits, sampling.max_tokens * num_texts
    return ITEM_BYTES * vocab_size * rows[0], ITEM_BYTES * vocab_size * rows[1] * sampling.generation_logits


def check_logits(request: ValidRequest, vocab_size: int, maximum: int) -> None:
    """Raise ``InvalidField`` for more than ``maximum`` bytes of logits, saying how many there would be, or for streamed
    logits."""
    context, generation = logits_size(request, vocab_size)
    if not context + generation:
        return
    field = "context_logits" if context >= generation else "generation_logits"
    if request.stream:
        raise InvalidField(field, True, "false with stream: logits come with whole replies alone")
    if context + generation > maximum:
        rows = max(context, generation) // (ITEM_BYTES * vocab_size)
        asked = f"{context + generation} bytes, {rows} rows of {vocab_size} numbers among them"
        allowed = f"at most {maximum} bytes in a request, its context and generation logits together (max_logits_bytes)"
        raise InvalidField(field, asked, allowed)
