"""Guard against special-token injection: control tokens that callers write in messages are encoded as text; only those
that the template itself writes become tokens.

Control tokens in the callers' texts are marked before the template is rendered. After rendering, each marked token is
encoded as ordinary text. The guard has no state and no lock. However long a message is, no single step blocks other
threads for longer than one stretch of text takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from tokenizers import Tokenizer

from ...interface.errors import InvalidField
from ...tool_calls.trusted_text import ComposedText

START_MARK, END_MARK = "\ufdd0", "\ufdd1"  # noncharacters, which Unicode reserves for internal use
_ESCAPES = re.compile(r"\\ufdd0")
_OWN_KEYS = frozenset({"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"})  # of messages
STRETCH_CHARACTERS = 16384  # characters searched in one step
PIECES_PER_BATCH = 256  # pieces tokenised in one step


class InjectionGuard:
    """The guard of one chat template. Its control tokens are all special tokens, and the added tokens that its
    ``source`` contains.

    ``plain`` is a copy of ``backend`` that encodes special tokens as text; only the constructor uses it.
    """

    def __init__(self, tokenizer: Any, backend: Tokenizer, plain: Tokenizer, source: str) -> None:
        named = getattr(tokenizer, "chat_control_tokens", None)
        known = source if named is None else "\0".join(named)
        self._ids = {
            token.content: token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special or (token.content in known and not token.content.isspace())
        }
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._escaped = re.compile(rf"\\ufdd0({self._pattern.pattern})\\ufdd1")
        self._max_length = max(map(len, self._ids), default=0)
        self._backend = backend
        # each piece is encoded after a newline; otherwise some tokenizers would put a space before it
        self._newline = backend.encode("\n", add_special_tokens=False).ids
        self._spelt = {token: self._after_newline(plain, token) for token in self._ids}

    def found_in(self, value: Any) -> bool:
        """Return whether any string in ``value`` (messages, tools, template variables) has a control token of the
        caller.

        Names of properties count too; text that this server wrote (``TrustedText``) does not.
        """
        if type(value) is str:
            return next(self._spans(value), None) is not None
        if isinstance(value, dict):
            return any(map(self.found_in, value.keys() - _OWN_KEYS)) or any(map(self.found_in, value.values()))
        if isinstance(value, ComposedText):
            return any(map(self.found_in, value.parts))
        return any(map(self.found_in, value)) if isinstance(value, list | tuple) else False

    def mark(self, value: Any) -> Any:
        """Return ``value`` with marks around the control tokens in its strings; removes marks that it had before."""
        if type(value) is str:
            return self._marked(unmarked(value))
        if isinstance(value, dict):
            return {self.mark(key): self.mark(entry) for key, entry in value.items()}
        if isinstance(value, ComposedText):
            return "".join(map(self.mark, value.parts))
        return [self.mark(entry) for entry in value] if isinstance(value, list | tuple) else value

    def encode(self, rendered: str) -> tuple[int, ...]:
        """Return the token ids of a chat that was rendered from marked messages.

        Raises ``InvalidField`` for a control token that the tokenizer cannot encode as text.
        """
        first, *others = self._plain_marks(rendered).split(START_MARK)
        texts, spelt = [unmarked(first)], []
        for other in others:
            token, _, text = other.partition(END_MARK)
            is_token = token in self._ids  # otherwise the template has cut off a mark, which still divides the text
            texts.append(unmarked(text if is_token else other))
            spelt.append(self._spelt_out(token) if is_token else [])
        pieces = self._encode_pieces(texts)
        return tuple(chain(next(pieces), *(chain(ids, piece) for ids, piece in zip(spelt, pieces, strict=True))))

    def _plain_marks(self, rendered: str) -> str:
        """Return ``rendered`` with plain marks where a template has written them as escapes (of JSON or a repr)."""
        if _ESCAPES.search(rendered) is None:
            return rendered
        return self._escaped.sub(lambda found: START_MARK + found[1] + END_MARK, rendered)

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield where control tokens begin and end. Searches stretch by stretch, so that other threads can run."""
        at = 0
        while at < len(text):
            found = self._pattern.search(text, at, at + STRETCH_CHARACTERS)
            whole_until = (
                at + STRETCH_CHARACTERS - self._max_length
            )  # a token that begins after it may extend beyond the stretch
            if found is None:
                at = whole_until + 1
            elif found.start() > whole_until and at + STRETCH_CHARACTERS < len(text):
                at = found.start()
            else:
                yield found.span()
                at = found.end()

    def _marked(self, text: str) -> str:
        parts, at = [], 0
        for begin, end in self._spans(text):
            parts += [text[at:begin], START_MARK, text[begin:end], END_MARK]
            at = end
        return "".join([*parts, text[at:]])

    def _encode_pieces(self, texts: list[str]) -> Iterator[list[int]]:
        written = [texts[0], *("\n" + text if text else "" for text in texts[1:])]
        for start in range(0, len(texts), PIECES_PER_BATCH):
            group = written[start : start + PIECES_PER_BATCH]
            for i, encoding in enumerate(self._backend.encode_batch_fast(group, add_special_tokens=False), start):
                yield encoding.ids if i == 0 else self._after_newline(self._backend, texts[i], encoding.ids)

    def _after_newline(self, tokenizer: Tokenizer, text: str, both: list[int] | None = None) -> list[int]:
        """Return the ids of ``text`` from ``both``, the ids of a newline followed by ``text``."""
        if both is None:
            both = tokenizer.encode("\n" + text, add_special_tokens=False).ids
        size = len(self._newline)
        if not text or both[:size] == self._newline:
            return both[size:]
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def _spelt_out(self, token: str) -> list[int]:
        ids = self._spelt[token]
        if self._ids[token] in ids:
            raise InvalidField("messages", token, "messages without it: the tokenizer makes this token of any text")
        return ids


def unmarked(text: str) -> str:
    """Return ``text`` without marks."""
    return text if text.isascii() else text.replace(START_MARK, "").replace(END_MARK, "")
