"""The bytes of tokens, of every kind of fast tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizer_kinds import KINDS, WORDS

from mlflow_llm.serving.model_files.token_bytes import plain_token, token_bytes

SPECIAL = frozenset({1, 2})


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_the_bytes_of_its_tokens(kind: str) -> None:
    """The bytes of a text's tokens, joined, are what the tokenizer's own decoder makes of them behind another text."""
    tokenizer: Any = KINDS[kind]()
    table = token_bytes(tokenizer, SPECIAL)
    assert len(table) == tokenizer.get_vocab_size()
    anchor = plain_token(tokenizer, SPECIAL)
    before = tokenizer.decode([anchor])
    for text in WORDS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(table[i] for i in ids) == tokenizer.decode([anchor, *ids]).removeprefix(before).encode()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_tokens_of_parts_of_characters(kind: str) -> None:
    """A character that is no token is made of the bytes of several, none of which is text by itself."""
    tokenizer: Any = KINDS[kind]()
    table = token_bytes(tokenizer, SPECIAL)
    ids = tokenizer.encode("\U0001f9ea", add_special_tokens=False).ids
    assert b"".join(table[i] for i in ids).endswith("\U0001f9ea".encode())
    assert len(ids) >= 4


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_their_names(kind: str) -> None:
    """A special token's bytes are its name, whatever the decoder would do with it."""
    assert [token_bytes(KINDS[kind](), SPECIAL)[i] for i in (1, 2)] == [b"<s>", b"</s>"]


def test_a_decoder_that_looks_further_is_refused() -> None:
    """A decoder under which a token's text depends on the next token (GPT-1's kind) is refused with the reason."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "a</w>": 3, "b</w>": 4, "c": 5, "the</w>": 6}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.BPEDecoder("</w>"), decoders.Fuse(), decoders.Strip("b", 0, 1)])
    with pytest.raises(ValueError, match=r"depends on more|no token for ordinary"):
        token_bytes(tokenizer, SPECIAL)
