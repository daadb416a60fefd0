"""Small tokenizers of every kind of transformers' fast tokenizers; <s> is token 1, </s> is token 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = ["the quick brown fox", '{"name": "Bob", "age": 12}', "yes", " no", "a, b. c", "größe", "[1, 2]"]
CORPUS = [*WORDS, 'jumps over the lazy dog {} [] : , . " 0123456789 - true false null'] * 20
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level() -> Any:
    """Return a byte-level BPE as GPT-2, Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> Any:
    """Return SentencePiece's BPE, as Llama 2 and Mistral have it: a space before every text, bytes for unknown
    characters."""
    letters = sorted(set("".join(CORPUS)) - {" ", "ö"})
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *letters]
    tokens += ["\u2581t", "he", "\u2581the", '{"', '":']
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("{", '"'), ('"', ":")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def unigram() -> Any:
    """Return SentencePiece's Unigram, as T5 and XLNet have it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False, initial_alphabet=list('{}[]":,')
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Any:
    """Return BERT's WordPiece: parts of words have a prefix, punctuation loses the space before it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], Any]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "unigram": unigram,
    "word_piece": word_piece,
}


def save(tokenizer: Any, directory: Path) -> Path:
    """Save a tokenizer as a packaged model has it."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(directory)
    return directory
