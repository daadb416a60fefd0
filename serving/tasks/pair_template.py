"""What a tokenizer puts around one text and around a pair of them: found out once, so that pairs are put together from
the tokens of their texts, each encoded once, and cut to any length.

::

    BERT        [CLS] first [SEP] second [SEP]        tokens behind the first [SEP] are of the second type
    RoBERTa     <s> first </s></s> second </s>        one type
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import Tokenizer

from ..errors import PackagingError


class Pair(NamedTuple):
    """``second_from``: from which token on they are of the second type; all tokens where none is."""

    token_ids: tuple[int, ...]
    second_from: int
    cut: bool


class PairTemplate:
    """Of ``backend``, as it stands. ``typed``: whether the model is told which text a token is of.

    Raises ``PackagingError`` for a tokenizer that mixes the two texts.
    """

    def __init__(self, backend: Tokenizer, *, typed: bool) -> None:
        first, second = (len(backend.encode(text, add_special_tokens=False)) for text in ("a", "b"))
        # encoded as a pair: post_process of two encodings forgets whose the first text's tokens are, under a
        # TemplateProcessing
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
        """Tokens of a pair that are of neither text."""
        return len(self._lead) + len(self._middle) + len(self._tail)

    def join(self, first: tuple[int, ...], second: tuple[int, ...], limit: int) -> Pair:
        """A pair of at most ``limit`` tokens, the longer text cut first (transformers' "longest_first")."""
        sizes = _longest_first(len(first), len(second), limit - self.num_special)
        cut = sizes != (len(first), len(second))
        ids = self._lead + first[: sizes[0]] + self._middle + second[: sizes[1]] + self._tail
        behind = len(self._lead) + sizes[0] + self._behind_first
        return Pair(ids, behind if self._has_types else len(ids), cut)


def pair_template(tokenizer: Any) -> PairTemplate:
    """Of a fast tokenizer of transformers', whatever it pads or cuts by itself. Raises ``PackagingError``."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return PairTemplate(backend, typed="token_type_ids" in tokenizer.model_input_names)


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens stay of each text, as ``tokenizers`` has it: the longer one is cut to the room that the shorter
    one leaves; where that is less than the shorter one has, they share it, the second gets an odd one."""
    if first + second <= room:
        return first, second
    shorter, longer = min(first, second), max(first, second)
    longer = shorter if shorter > room else max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room // 2 + room % 2
    return (longer, shorter) if first > second else (shorter, longer)
