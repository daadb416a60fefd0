"""How forwards are cut if a result must be bitwise the same alone and in any batch (``batch_invariant``).

torch's kernels choose the order of their additions by the shape of their input, so the last bits of a row change with
the batch. With this setting each forward has one sequence, and a shape that depends only on the length of its prompt::

    prompt of 300 tokens   [ 0 … 127 ][ 128 … 255 ][ 256 … 299 ]   then [ 300 ][ 301 ] …   generated, one by one

The forwards are the same however the scheduler cuts a prompt, whatever runs beside it, and after a preemption or in
another engine, both of which compute everything again. Our own kernels add in a fixed order and need none of this.
"""

from __future__ import annotations

from collections.abc import Iterator

PIECE_TOKENS = 128  # tokens of a prompt in one forward


def piece_end(place: int, num_prompt: int) -> int:
    """Return the end of the piece that contains the token at ``place``."""
    if place >= num_prompt:
        return place + 1
    return min((place // PIECE_TOKENS + 1) * PIECE_TOKENS, num_prompt)


def whole_pieces(start: int, end: int, num_prompt: int) -> int:
    """Return the ``end`` of a run of tokens from ``start``, moved to the end of the piece that it would otherwise
    cut."""
    return max(end, piece_end(end - 1, num_prompt)) if start < end else end


def pieces(start: int, end: int, num_prompt: int) -> Iterator[tuple[int, int]]:
    """Yield the pieces of a run of tokens as (start, end)."""
    while start < end:
        stop = min(piece_end(start, num_prompt), end)
        yield start, stop
        start = stop
