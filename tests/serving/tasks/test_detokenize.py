"""Incremental detokenising equals decoding the whole."""

import random

import pytest


def _streamed(text, ids, skip=True):
    detokenizer = text.detokenizer(skip)
    return "".join([*(detokenizer.push(i) for i in ids), detokenizer.flush()])


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("skip", [True, False])
def test_random_tokens_byte_level(text, seed, skip):
    """Any sequence of token ids, valid UTF-8 or not, streams to exactly the tokenizer's decode of all of them."""
    draw = random.Random(seed)
    ids = [draw.randrange(text.vocab_size) for _ in range(draw.randrange(1, 80))]
    assert _streamed(text, ids, skip) == text.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("written", ["hello world", "größe 你好 😀🎉 the dog", "😀", " leading", "a\n\nb\t", "é" * 40])
def test_real_text(any_text, written):
    """Multi-byte characters spread over tokens come out whole, with the spaces they had."""
    ids = any_text.encode(written, add_special_tokens=False)
    assert _streamed(any_text, ids) == any_text.decode(ids)


@pytest.mark.parametrize("seed", range(40))
def test_random_valid_text_byte_fallback(fallback_text, seed):
    """Random words, emoji and special tokens between them stream to the decode of the whole with byte fallback too."""
    draw = random.Random(seed)
    ids = []
    for _ in range(draw.randrange(1, 20)):
        ids += fallback_text.encode(draw.choice(["the dog", "hello", "😀", "ж", "the"]), add_special_tokens=False)
        ids += [draw.choice([1, 2])] * draw.randrange(2)
    assert _streamed(fallback_text, ids) == fallback_text.decode(ids)


def test_incomplete_character_is_held(text):
    """No half character is ever delivered: text waits for the last byte."""
    ids = text.encode("🧪", add_special_tokens=False)
    assert len(ids) > 1
    detokenizer = text.detokenizer()
    assert [detokenizer.push(i) for i in ids] == [""] * (len(ids) - 1) + ["🧪"]


def test_id_without_token(any_text):
    """An id of a padded embedding row has no text and breaks nothing."""
    assert _streamed(any_text, [any_text.vocab_size + 50]) == ""
    assert any_text.token_bytes(any_text.vocab_size + 50) == b""


def test_token_bytes_join_to_text(text):
    """The bytes of the tokens of a text, joined, are the text's UTF-8."""
    ids = text.encode("größe 😀", add_special_tokens=False)
    assert b"".join(text.token_bytes(i) for i in ids).decode() == "größe 😀"
