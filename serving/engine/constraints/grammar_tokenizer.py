"""The tokenizer as llguidance needs it: the bytes of every token, and how a text is split into tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...interface.bundle import Bundle
from ...model_files.eos import eos_ids
from ...model_files.token_bytes import TokenBytes, plain_token, token_bytes
from ...structured.distinct_keys import KeyTokens

if TYPE_CHECKING:
    from llguidance import LLTokenizer

END_TOKEN = b"<|end of grammar|>"
MAX_GREEDY = 64  # longest token in bytes that is tried if a text has to be split by length alone


@dataclass(frozen=True)
class GrammarTokenizer:
    """A tokenizer for grammars.

    ``vocab_size`` is the width of the model's logits; ``matched`` has one more token, which is a grammar's end.
    ``special_ids`` are tokens that are not text: the tokenizer's special tokens and every end of text. ``table`` has
    the bytes of every token. ``writes_all``: the tokens can write every text; if not, a grammar may ask for one that
    they cannot write. ``strips_space``: the decoder removes a space at a text's beginning."""

    matched: LLTokenizer
    vocab_size: int
    special_ids: frozenset[int]
    table: TokenBytes
    writes_all: bool
    strips_space: bool = False

    def prepare(self) -> None:
        """Compute ``key_tokens`` now rather than at first use."""
        _ = self.key_tokens

    @cached_property
    def key_tokens(self) -> KeyTokens:
        return KeyTokens([b"" if i in self.special_ids else data for i, data in enumerate(self.table)])


def load(bundle: Bundle, vocab_size: int, *, trust_remote_code: bool) -> GrammarTokenizer:
    """Read the tokenizer in the way that detokenization does.

    Raises ``ValueError`` if its texts are not made token by token, and whatever transformers raises."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    hf: Any = AutoTokenizer.from_pretrained(
        bundle.tokenizer_dir, trust_remote_code=trust_remote_code, local_files_only=True
    )
    backend = Tokenizer.from_str(hf.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    ends = eos_ids(bundle.model_dir, hf)
    special = {i for i, token in hf.added_tokens_decoder.items() if token.special}
    special |= {*hf.all_special_ids, *ends}
    return make(backend, frozenset(i for i in special if 0 <= i < vocab_size), vocab_size)


def make(backend: Any, special_ids: frozenset[int], vocab_size: int) -> GrammarTokenizer:
    """Make it from a tokenizer of ``tokenizers``. Logits beyond the tokenizer's tokens are never allowed."""
    from llguidance import LLTokenizer, TokenizerWrapper

    table = token_bytes(backend, special_ids)
    padding = (b"",) * (vocab_size - len(table))
    wrapper: Any = _Wrapped(backend, table, special_ids, vocab_size)
    wrapper.tokens = [*table[:vocab_size], *padding, END_TOKEN]
    matched = LLTokenizer(TokenizerWrapper(wrapper), n_vocab=vocab_size + 1, eos_token=[vocab_size])
    spaced = next(
        (i for i, data in enumerate(table) if data[:1] == b" " and data.strip() and i not in special_ids), None
    )
    return GrammarTokenizer(
        matched,
        vocab_size,
        special_ids,
        tuple(wrapper.tokens[:vocab_size]),
        wrapper.writes_all,
        strips_space=spaced is not None and not backend.decode([spaced]).startswith(" "),
    )


class _Wrapped:
    """The interface that llguidance's ``TokenizerWrapper`` expects."""

    bos_token_id = None
    tokens: list[bytes]

    def __init__(self, backend: Any, table: TokenBytes, special_ids: frozenset[int], vocab_size: int) -> None:
        self.eos_token_id = vocab_size
        self.special_token_ids = [*sorted(special_ids), vocab_size]
        self._table = table
        self._text_ids = {data: i for i, data in enumerate(table) if data and i not in special_ids and i < vocab_size}
        self._backend = backend
        self._backend.encode_special_tokens = True  # names of special tokens in a text are plain text
        self._anchor = plain_token(backend, special_ids)
        self._before = backend.decode([self._anchor])

    @property
    def writes_all(self) -> bool:
        return all(bytes([byte]) in self._text_ids for byte in range(256))

    def __call__(self, text: bytes | str) -> list[int]:
        """Split a text into tokens whose bytes are the text's.

        The tokenizer's own split is taken if it neither adds nor changes anything: that of the text by itself, or else
        that after another token. If the tokenizer changes the text, the longest tokens that fit are taken."""
        data = text.encode() if isinstance(text, str) else text
        try:
            written = data.decode()
        except UnicodeDecodeError:
            return self._greedy(data)
        ids: list[int] = self._backend.encode(written, add_special_tokens=False).ids
        if self._are(ids, data):
            return ids
        ids = self._backend.encode(self._before + written, add_special_tokens=False).ids
        if self._anchor in ids:
            ids = ids[ids.index(self._anchor) + 1 :]
            if self._are(ids, data):
                return ids
        return self._greedy(data)

    def _are(self, ids: list[int], data: bytes) -> bool:
        special = self.special_token_ids
        return b"".join(self._table[i] for i in ids) == data and not any(i in special for i in ids)

    def _greedy(self, data: bytes) -> list[int]:
        ids: list[int] = []
        while data:
            sizes = range(min(len(data), MAX_GREEDY), 0, -1)
            size = next((n for n in sizes if data[:n] in self._text_ids), 0)
            if not size:
                return ids  # a byte that no token has
            ids.append(self._text_ids[data[:size]])
            data = data[size:]
        return ids
