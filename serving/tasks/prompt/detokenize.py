"""Converts token ids to text, one token at a time. The result equals decoding all of them at once.

A byte-level tokenizer (GPT-2's kind: Llama 3, Qwen, SmolLM) maps each token to bytes, so an incremental UTF-8 decoder
is exact and costs the same for every token. Other tokenizers (SentencePiece's kind) decode a token depending on the
tokens before it, so a window of tokens is decoded with and without the new ones, and the difference is the new text.
There, text is held while it ends in U+FFFD, the sign of an incomplete character, for at most ``MAX_HELD`` tokens.
One case differs on purpose: if a run of SentencePiece's byte tokens becomes invalid after a valid character, decoding
the whole run would take back that character, which has already been delivered; here it stays.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

MAX_HELD = 16


class Detokenizer(Protocol):
    """The detokenizer of one sequence."""

    def push(self, token_id: int) -> str:
        """Return the text that becomes certain with this token; "" while a character is incomplete."""
        ...

    def ahead(self, token_id: int) -> int:
        """Return how many characters ``push`` would return before the first character of ``token_id``.

        These come from an incomplete character that the token does not continue. 0 if the token continues it, or if
        there is none.
        """
        ...

    def flush(self) -> str:
        """Return the remaining text at the end of the sequence, with incomplete bytes as U+FFFD."""
        ...


class ByteDetokenizer:
    """The detokenizer for byte-level tokenizers: an incremental UTF-8 decoder over the bytes of each token."""

    __slots__ = ("_bytes", "_decoder", "_is_within")

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """Take ``token_bytes``: item ``i`` has the bytes of token ``i``, b"" for a token to be skipped."""
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_within = False  # whether the text so far ends within a character

    def push(self, token_id: int) -> str:
        if token_id >= len(self._bytes):  # a padding row of the embedding: it has no text
            return ""
        data = self._bytes[token_id]
        if not self._is_within:  # most tokens are whole characters, for which the decoder is slow
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._is_within = bool(self._decoder.getstate()[0])
        return text

    def ahead(self, token_id: int) -> int:
        incomplete = self._decoder.getstate()[0]
        first = self._bytes[token_id][:1] if token_id < len(self._bytes) else b""
        if not incomplete or not first:
            return 0
        trial = codecs.getincrementaldecoder("utf-8")("replace")
        # the character of the first byte itself is either the last one returned or still incomplete
        return len(trial.decode(incomplete + first)) - (not trial.getstate()[0])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """The detokenizer for all other tokenizers: it decodes a window of tokens with and without the new one.

    The window begins at ``start``. The text of ``ids[start:read]`` was delivered last and stays in the window as left
    context.
    """

    __slots__ = ("_backend", "_ids", "_read", "_skip", "_start")

    def __init__(self, backend: Any, skip_special_tokens: bool, before: Sequence[int] = ()) -> None:
        """Begin after ``before``, the tokens of a text that has been delivered already."""
        self._backend = backend
        self._skip = skip_special_tokens
        self._ids: list[int] = list(before)
        self._start = 0
        self._read = len(before)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._deliver(final=False)

    def ahead(self, token_id: int) -> int:
        if self._read == len(self._ids):
            return 0
        before, held = self._decode(self._ids[self._start : self._read]), self._decode(self._ids[self._start :])
        after = self._decode([*self._ids[self._start :], token_id])
        goes_on = after.endswith("\ufffd") or not after.startswith(held)
        return 0 if goes_on else len(held) - len(before)

    def flush(self) -> str:
        return self._deliver(final=True)

    def _deliver(self, final: bool) -> str:
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        held = len(self._ids) - self._read
        if not final and after.endswith("\ufffd") and held < MAX_HELD:
            return ""
        if len(after) <= len(before) and not final:  # a skipped token, or the decoder needs the next token
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=self._skip)
        return text


def starts(detokenizer: Detokenizer, token_ids: Sequence[int]) -> tuple[list[int], int]:
    """Return the position of each token's first character in the text of all tokens, and the text's length."""
    found, length = [], 0
    for token_id in token_ids:
        found.append(length + detokenizer.ahead(token_id))
        length += len(detokenizer.push(token_id))
    return found, length + len(detokenizer.flush())
