"""What is computed together where a result must be bitwise the same alone and in any batch (``batch_invariant``).

Kernels of torch choose by the shape of their input in which order they add, so that a row's last bits are others in
another batch. Here each forward is of one sequence, and of a shape that follows from the length of its prompt alone::

    prompt of 300 tokens   [ 0 … 127 ][ 128 … 255 ][ 256 … 299 ]   then [ 300 ][ 301 ] …   generated, one by one

However the scheduler cuts a prompt, whoever runs beside it, and after a preemption or in another engine, which compute
all of that again, it is the same forwards. Our own kernels add in an order of their own and need none of this.
"""

from __future__ import annotations

from collections.abc import Iterator

PIECE = 128  # tokens of a prompt in one forward


def piece_end(place: int, num_prompt: int) -> int:
    """Where the piece ends that has the token at ``place``."""
    if place >= num_prompt:
        return place + 1
    return min((place // PIECE + 1) * PIECE, num_prompt)


def whole_pieces(start: int, end: int, num_prompt: int) -> int:
    """``end`` of a run of tokens from ``start`` on, or the end of the piece that it would cut."""
    return max(end, piece_end(end - 1, num_prompt)) if start < end else end


def pieces(start: int, end: int, num_prompt: int) -> Iterator[tuple[int, int]]:
    """The pieces of a run of tokens, each from one place to another."""
    while start < end:
        stop = min(piece_end(start, num_prompt), end)
        yield start, stop
        start = stop
