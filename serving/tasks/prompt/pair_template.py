"""The special tokens that a tokenizer puts around a pair of texts.

They are determined once. Pairs are then joined from the tokens of their texts, so that each text is encoded only once
and can be cut to any length.

::

    BERT        [CLS] first [SEP] second [SEP]        tokens after the first [SEP] have the second type
    RoBERTa     <s> first </s></s> second </s>        only one type
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import Tokenizer

from ...interface.errors import PackagingError


class Pair(NamedTuple):
    """A joined pair. Tokens from ``second_from`` on have the second type; it is the length if none has that type."""

    token_ids: tuple[int, ...]
    second_from: int
    cut: bool


class PairTemplate:
    """The pair template of ``backend``. ``typed`` says whether the model gets token types.

    ``backend`` must not pad or truncate. Raises ``PackagingError`` for a tokenizer that mixes the two texts.
    """

    def __init__(self, backend: Tokenizer, *, typed: bool) -> None:
        first, second = (len(backend.encode(text, add_special_tokens=False)) for text in ("a", "b"))
        # Encoded as a pair, because post_process of two encodings loses, with a TemplateProcessing, the information
        # which tokens belong to the first text.
        both = backend.encode("a", "b")
        owners = both.sequence_ids
        if 0 not in owners or 1 not in owners or owners.index(1) < owners.index(0):
            raise PackagingError("tokenizer: it does not put a pair's first text before its second")
        begin, again = owners.index(0), owners.index(1)
        ids, types = both.ids, both.type_ids if typed else []
        self._lead = tuple(ids[:begin])
        self._middle = tuple(ids[begin + first : again])
        self._tail = tuple(ids[again + second :])
        if types != sorted(types) or set(types) - {0, 1}:
            raise PackagingError("tokenizer: its token types are not first 0 and then 1")
        self._second_type = types.index(1) if 1 in types else len(ids)
        self._behind_first = self._second_type - begin - first
        self._has_types = self._second_type < len(ids)

    @property
    def num_special(self) -> int:
        """How many tokens of a pair belong to neither text."""
        return len(self._lead) + len(self._middle) + len(self._tail)

    def join(self, first: tuple[int, ...], second: tuple[int, ...], limit: int) -> Pair:
        """Return a pair of at most ``limit`` tokens; the longer text is cut first (transformers' "longest_first")."""
        sizes = _longest_first(len(first), len(second), limit - self.num_special)
        cut = sizes != (len(first), len(second))
        ids = self._lead + first[: sizes[0]] + self._middle + second[: sizes[1]] + self._tail
        behind = len(self._lead) + sizes[0] + self._behind_first
        return Pair(ids, behind if self._has_types else len(ids), cut)


def pair_template(tokenizer: Any) -> PairTemplate:
    """Return the pair template of a fast tokenizer of transformers; its own padding and truncation are ignored.

    Raises ``PackagingError``.
    """
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return PairTemplate(backend, typed="token_type_ids" in tokenizer.model_input_names)


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of each text remain, as in the ``tokenizers`` library.

    The longer text is cut to the room that the shorter one leaves. If that is less than the length of the shorter one,
    they share the room equally, and the second text gets the odd token.
    """
    if first + second <= room:
        return first, second
    shorter, longer = min(first, second), max(first, second)
    longer = shorter if shorter > room else max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room // 2 + room % 2
    return (longer, shorter) if first > second else (shorter, longer)
