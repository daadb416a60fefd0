"""Incremental detokenising equals decoding the whole."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlflow_llm.serving.tasks.prompt.detokenize import starts


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
    """Text waits for the last byte of a character: no half character is delivered."""
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


BYTES = st.lists(
    st.one_of(st.binary(min_size=1, max_size=5), st.text(min_size=1, max_size=3).map(str.encode)), max_size=20
)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(written=BYTES)
def test_starts_of_any_bytes(text, written):
    """Each token of whole characters stands in the text where it is said to start, whatever stands before it."""
    single = {text.token_bytes(i): i for i in range(text.vocab_size) if len(text.token_bytes(i)) == 1}
    ids = [single[bytes([byte])] for data in written for byte in data]
    begun, length = starts(text.detokenizer(False), ids)
    whole = text.decode(ids, skip_special_tokens=False)
    assert length == len(whole)
    assert begun == sorted(begun)
    for start, token_id in zip(begun, ids, strict=True):
        data = text.token_bytes(token_id)
        assert whole.startswith(data.decode() if data.isascii() else "", start)
        assert start < len(whole)


@pytest.mark.parametrize("seed", range(40))
def test_starts_of_whole_tokens(text, seed):
    """Whole tokens stand at their reported starts, among tokens of several or partial characters and special ones."""
    draw = random.Random(seed)
    ids = [draw.randrange(text.vocab_size) for _ in range(60)]
    begun, _ = starts(text.detokenizer(False), ids)
    whole = text.decode(ids, skip_special_tokens=False)
    for start, token_id in zip(begun, ids, strict=True):
        if "\ufffd" not in (token := text.token_bytes(token_id).decode(errors="replace")):
            assert whole.startswith(token, start)


def test_starts_of_parts(text):
    """Parts of one character have one start; an incomplete character is one U+FFFD before what follows it."""
    single = {text.token_bytes(i): i for i in range(text.vocab_size)}
    written = [b"a", b"\xc3", b"\xa9", b" ", b"\xe6", b"b", b"\xf0", b"\xe6", b"\x97", b"c"]
    assert starts(text.detokenizer(), [single[data] for data in written]) == ([0, 1, 1, 2, 3, 4, 5, 6, 6, 7], 8)


def test_starts_with_byte_fallback(fallback_text):
    """A character of byte tokens has one start; the space before the first word is not in the text."""
    ids = fallback_text.encode("the 😀 dog", False)
    begun, length = starts(fallback_text.detokenizer(), ids)
    named = [fallback_text.token_bytes(i) for i in ids]
    assert named[:6] == [b" the", b" ", b"\xf0", b"\x9f", b"\x98", b"\x80"]
    assert begun[:7] == [0, 3, 4, 4, 4, 4, 5]
    assert length == len("the 😀 dog")


def test_a_space_at_the_beginning_is_kept_where_a_grammar_counts_it(any_text):
    """A sequence's leading space is kept on request and dropped otherwise, as in the tokenizer's decode."""
    ids = any_text.encode("a the dog", add_special_tokens=False)[-2:]
    whole = any_text.decode(any_text.encode("a the dog", add_special_tokens=False))
    detokenizer = any_text.detokenizer(keeps_space=True)
    assert whole.endswith("".join([*(detokenizer.push(i) for i in ids), detokenizer.flush()]))
    kept = any_text.detokenizer(keeps_space=True)
    assert any(kept.push(i).startswith(" ") for i in any_text.encode("a the", add_special_tokens=False)[1:])
