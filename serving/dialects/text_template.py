"""The bytes around the text of a delta, which are the same for all deltas of a stream and prepared once."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from .sse import without_line_ends

_encode = msgspec.json.Encoder().encode


class TextTemplate:
    """A template of ``encode``, which makes an event that contains a text once, as a JSON string.

    ``fill`` makes the same bytes without calling ``encode``.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, encode: Callable[[str], bytes]) -> None:
        one, other = encode("0"), encode("1")
        assert len(one) == len(other)
        differing = int.from_bytes(one) ^ int.from_bytes(other)  # in one byte: no loop over them, for each stream
        at = len(one) - (differing.bit_length() + 7) // 8
        self._before, self._after = one[: at - 1], one[at + 2 :]

    def fill(self, text: str) -> bytes:
        data = _encode(text)
        if not data.isascii():  # said here, not in a function of its own: this is done for each token
            data = without_line_ends(data)
        return self._before + data + self._after
