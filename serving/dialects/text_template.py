"""The bytes around a streamed text, which are the same from delta to delta, prepared once a stream."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

_encoder = msgspec.json.Encoder()


class TextTemplate:
    """``encode`` makes an event of any text, whose JSON string stands in it once; ``fill`` makes the same bytes."""

    __slots__ = ("_after", "_before")

    def __init__(self, encode: Callable[[str], bytes]) -> None:
        one, other = encode("0"), encode("1")
        at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        self._before, self._after = one[: at - 1], one[at + 2 :]

    def fill(self, text: str) -> bytes:
        return self._before + _encoder.encode(text) + self._after
