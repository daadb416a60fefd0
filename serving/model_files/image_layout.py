"""The positions of the tokens of images in a prompt, by the sizes of the images (``bundle.ImageSpec``)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..interface.bundle import ImageSpec

MAX_SCALED_SIDE = 4096  # pixels of a side to which an image is ever scaled (Idefics 3)
MAX_RATIO = 50  # of an image's sides: a processor that scales the shorter one makes a huge image of a thin one
Size = tuple[int, int]  # width, height


def expanded(
    ids: Sequence[int], sizes: Sequence[Size], spec: ImageSpec, first_id: int, *, numbered: bool = True
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ``ids`` with the tokens of the images in place of their placeholders, and how many tokens each has.

    There are as many placeholders as ``sizes``. The tokens of the first image are ``first_id``, ``first_id + 1`` and
    so on, those of the next follow; unless they are ``numbered``, all are ``first_id``."""
    found: list[int] = []
    counts: list[int] = []
    remaining = iter(sizes)
    for token_id in ids:
        if token_id != spec.placeholder_id:
            found.append(token_id)
            continue
        layout = layout_of(next(remaining), spec)
        counts.append(layout.count(spec.image_id))
        next_id = first_id + (sum(counts[:-1]) if numbered else 0)
        for inner in layout:
            found.append(next_id if inner == spec.image_id else inner)
            next_id += numbered and inner == spec.image_id
    return tuple(found), tuple(counts)


def is_too_thin(size: Size) -> bool:
    """Return whether one side of an image is more than ``MAX_RATIO`` times as long as the other."""
    return max(size) > MAX_RATIO * min(size)


def layout_of(size: Size, spec: ImageSpec) -> tuple[int, ...]:
    """Return the tokens that stand for an image of this size."""
    if spec.layout == "fixed":
        return spec.ids
    rows, columns = grid(size, spec.longest_edge, spec.tile)
    if not rows:
        return spec.single
    lines = [[token for head in heads[:columns] for token in (*head, *spec.ids)] for heads in spec.tile_heads[:rows]]
    found = list(lines[0])
    for line in lines[1:]:
        found += [*spec.row_end, *line]
    return (*found, *spec.whole)


def grid(size: Size, longest_edge: int, tile: int) -> tuple[int, int]:
    """Return the rows and columns of tiles into which an image is cut; 0, 0 for none.

    As transformers' ``Idefics3ImageProcessor`` computes them, with its rounding."""
    width, height = _scaled(size, longest_edge)
    aspect = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / aspect) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * aspect) / tile) * tile
    return (height // tile, width // tile) if height > tile or width > tile else (0, 0)


def _scaled(size: Size, longest_edge: int) -> Size:
    width, height = size
    aspect = width / height
    if width >= height:
        width, height = longest_edge, int(longest_edge / aspect)
        height += height % 2
    else:
        width, height = int(longest_edge * aspect), longest_edge
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    aspect = width / height
    if width >= height and width > MAX_SCALED_SIDE:
        width, height = MAX_SCALED_SIDE, int(MAX_SCALED_SIDE / aspect)
    elif height > width and height > MAX_SCALED_SIDE:
        width, height = int(MAX_SCALED_SIDE * aspect), MAX_SCALED_SIDE
    return max(width, 1), max(height, 1)
