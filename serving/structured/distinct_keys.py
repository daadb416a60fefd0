"""Tracks the keys that the JSON objects in a text already have, because a grammar cannot prevent the repetition of a
key that no schema names.

``Keys`` follows the JSON in a text byte by byte and skips what is around it (markers of a call). The server's grammars
allow only one spelling of each key, so keys are equal exactly when their bytes are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_OPEN_OBJECT, _OPEN_ARRAY = b"{["
_CLOSE = frozenset(b"}]")


class KeyTokens:
    """The tokens of a vocabulary that can end a key: those that contain a quote. ``table`` has bytes by token id."""

    def __init__(self, table: Sequence[bytes]) -> None:
        quoted = [(data, token_id) for token_id, data in enumerate(table) if b'"' in data]
        self._sorted = sorted(quoted)
        self.whole = [(data, token_id) for data, token_id in quoted if data.count(b'"') > 1]  # may contain a whole key

    def beginning(self, prefix: bytes) -> Iterable[int]:
        """Yield the ids of the tokens that begin with ``prefix``, which contains a quote."""
        start = bisect_left(self._sorted, (prefix, -1))
        for data, token_id in self._sorted[start:]:
            if not data.startswith(prefix):
                return
            yield token_id


class Keys:
    """The position of a text within its JSON objects; ``feed`` takes all its bytes in order.

    Text that looks like an object but is none (a block of code) is abandoned at the first byte that JSON as the
    server's grammars write it cannot have there.
    """

    __slots__ = ("_escaped", "_has_begun", "_in_key", "_in_text", "_objects", "_part", "_wanted", "came_twice")

    def __init__(self) -> None:
        self._objects: list[set[bytes] | None] = []  # keys of open objects, the innermost last; None for an array
        self._in_key = self._in_text = self._escaped = False
        self._wanted = b""  # the bytes of which the next one must be one; b"" allows any
        self._has_begun = False  # only before that does a quote begin a string outside objects and arrays
        self._part = bytearray()  # the bytes so far of the string that is being written
        self.came_twice = False

    def copy(self) -> Keys:
        other = Keys()
        other._objects = [None if keys is None else set(keys) for keys in self._objects]
        other._in_key, other._in_text, other._escaped = self._in_key, self._in_text, self._escaped
        other._wanted, other._has_begun = self._wanted, self._has_begun
        other._part = bytearray(self._part)
        return other

    def feed(self, data: bytes) -> None:
        for byte in data:
            if self._in_text:
                self._text(byte)
                continue
            if self._wanted and byte not in self._wanted:
                self._objects.clear()
                self._in_key = False
            self._wanted = b""
            self._sign(byte)
            self._has_begun = True

    def _sign(self, byte: int) -> None:
        """Take a byte outside strings."""
        if byte == _QUOTE:
            self._in_text = bool(self._objects) or not self._has_begun
            self._part.clear()
        elif byte == _OPEN_OBJECT:
            self._objects.append(set())
            self._in_key, self._wanted = True, b'"}'
        elif byte == _OPEN_ARRAY and (self._objects or not self._has_begun):
            self._objects.append(None)
            self._in_key = False
        elif byte in _CLOSE and self._objects:
            self._objects.pop()
            self._in_key = False
        elif byte == _COMMA and self._objects and self._objects[-1] is not None:
            self._in_key, self._wanted = True, b' "'

    def _text(self, byte: int) -> None:
        if byte == _QUOTE and not self._escaped:
            self._in_text = False
            if self._in_key:
                self._end_key()
        else:
            if self._in_key:
                self._part.append(byte)
            self._escaped = byte == _BACKSLASH and not self._escaped

    def _end_key(self) -> None:
        used = self._objects[-1]
        assert used is not None
        key = bytes(self._part)
        self.came_twice = self.came_twice or key in used
        used.add(key)
        self._in_key, self._wanted = False, b":"

    def forbidden(self, tokens: KeyTokens, allows: Callable[[int], bool]) -> Iterable[int]:
        """Yield the ids of tokens that would repeat a key; some of those that ``allows`` rejects may be left out."""
        used = self._objects[-1] if self._objects else None
        if self._in_key and self._in_text and used:
            part = bytes(self._part)
            for key in used:
                if key.startswith(part):
                    yield from tokens.beginning(key[len(part) :] + b'"')
        elif any(self._objects):
            yield from (one for data, one in tokens.whole if allows(one) and self._would_repeat(data))

    def _would_repeat(self, data: bytes) -> bool:
        after = self.copy()
        after.feed(data)
        return after.came_twice
