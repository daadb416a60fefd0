"""Converts token ids to text, one token at a time. The result equals decoding all of them at once.

A byte-level tokenizer (GPT-2's kind: Llama 3, Qwen, SmolLM) maps each token to bytes, so an incremental UTF-8 decoder
is exact and costs the same for every token. Other tokenizers (SentencePiece's kind) decode a token depending on the
tokens before it, so a window of tokens is decoded with and without the new ones, and the difference is the new text.
There, text is held while it ends in U+FFFD, the sign of an incomplete character, for at most ``MAX_HELD`` tokens.
Two cases differ on purpose, because a decoder would take back text that has already been delivered; here it stays:
a run of SentencePiece's byte tokens that becomes invalid after a valid character, and a replacement that reaches over
several tokens.

A text that continues its prompt (a completion) is decoded after the prompt's last tokens, which are not in the text:
decoders of SentencePiece's kind remove the space before a text's first word, and others treat the first token
differently too. So prompt and text together are what decoding all tokens gives.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Protocol

MAX_HELD = 16
MAX_WINDOW = 64  # tokens; a longer run of spaces is decoded after the last of them alone
CONTEXT_TOKENS = 8  # tokens of a prompt that are looked at first, and spaces that are kept of a long run
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


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

    def __init__(self, token_bytes: Sequence[bytes], before: Sequence[int] = ()) -> None:
        """Take ``token_bytes``: item ``i`` has the bytes of token ``i``, b"" for a token to be skipped.

        ``before`` are the tokens of a text that the caller has; if it ends within a character, this text begins with
        that character.
        """
        self._bytes = token_bytes
        self._decoder = _Utf8Decoder("replace")
        self._is_within = False  # whether the text so far ends within a character
        if before:
            last = b""
            for i in reversed(before[-CONTEXT_TOKENS:]):
                last = (token_bytes[i] if i < len(token_bytes) else b"") + last
                if len(last) >= 3:  # a character has four bytes at most
                    break
            if not last.isascii():
                self._decoder.decode(last[-3:])
                self._is_within = bool(self._decoder.getstate()[0])

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
        trial = _Utf8Decoder("replace")
        # the character of the first byte itself is either the last one returned or still incomplete
        return len(trial.decode(incomplete + first)) - (not trial.getstate()[0])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """The detokenizer for all other tokenizers: it decodes a window of tokens with and without the new one.

    The window begins at ``start``. The text of ``ids[start:read]`` was delivered last and stays in the window as left
    context. It has a character other than a space, because decoders may remove spaces at the beginning.
    """

    __slots__ = ("_backend", "_ids", "_read", "_skip", "_start")

    def __init__(self, backend: Any, skip_special_tokens: bool, before: Sequence[int] = (), held: int = 0) -> None:
        """Begin after ``before``, the tokens of a text that the caller has, except the last ``held`` of them."""
        self._backend = backend
        self._skip = skip_special_tokens
        self._ids: list[int] = list(before)
        self._start = 0
        self._read = len(before) - held

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
        new = after[len(before) :]
        if not after.startswith(before) and "\ufffd" not in after:  # it replaces what was delivered
            new = after[next(i for i, pair in enumerate(zip_longest(before, after)) if pair[0] != pair[1]) :]
        if not new and not final:  # a skipped token, or the decoder needs the next token
            return ""
        if new.strip():
            self._start = self._read
        elif self._read - self._start > MAX_WINDOW:
            self._start = self._read - CONTEXT_TOKENS
        self._read = len(self._ids)
        return new

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
