"""The bytes that each token of a tokenizer stands for, used to build texts and to match grammars.

A byte-level tokenizer (GPT-2's kind: Llama 3, Qwen, SmolLM) maps every token to bytes by a table of characters. Tokens
of other tokenizers (SentencePiece's BPE and Unigram, WordPiece) are decoded after another token, so that the decoder
does not strip a leading space; tokens for a single byte (``<0xE2>``) are recognised by their names.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

TokenBytes: TypeAlias = tuple[bytes, ...]
"""By token id; b"" for an id that no token has."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
CHUNK_TOKENS = 4096  # tokens decoded per call, so that other threads get the interpreter lock
TRIALS, TRIAL_TOKENS = 16, 48


def byte_table(backend: Any, special_ids: frozenset[int]) -> tuple[TokenBytes, TokenBytes] | None:
    """Return ``(bytes of every token, the same with special tokens empty)`` for a byte-level tokenizer, else None.

    As in the decoder, a token whose characters all stand for bytes is those bytes; any other is its own UTF-8.
    """
    if type(backend.decoder).__name__ != "ByteLevel":
        return None
    to_byte = {char: byte for byte, char in _byte_characters().items()}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        try:
            table[token_id] = bytes(to_byte[char] for char in token)
        except KeyError:
            table[token_id] = token.encode()
    visible = tuple(b"" if i in special_ids else data for i, data in enumerate(table))
    return tuple(table), visible


def token_bytes(backend: Any, special_ids: frozenset[int]) -> TokenBytes:
    """Return the bytes of every token as text; for a special token, its name. ``backend`` is from ``tokenizers``.

    Raises ``ValueError`` if a text is not the concatenation of its tokens' bytes, so that no grammar could be matched
    token by token.
    """
    tables = byte_table(backend, special_ids)
    if tables is not None:
        return tables[0]
    names = _names(backend)
    anchor = plain_token(backend, special_ids)
    before = backend.decode([anchor], skip_special_tokens=False)
    by_name = "ByteFallback" in json.dumps(json.loads(backend.to_str()).get("decoder"))
    table = []
    for start in range(0, len(names), CHUNK_TOKENS):
        ids = range(start, min(start + CHUNK_TOKENS, len(names)))
        texts = backend.decode_batch([[anchor, i] for i in ids], skip_special_tokens=False)
        for i, text in zip(ids, texts, strict=True):
            named = BYTE_TOKEN.fullmatch(names[i]) if by_name else None
            if i in special_ids or not names[i]:
                table.append(names[i].encode())
            elif named is not None:
                table.append(bytes.fromhex(named[1]))
            else:
                table.append(text.removeprefix(before).encode())
    _try(backend, [i for i, name in enumerate(names) if name and i not in special_ids], table, anchor)
    return tuple(table)


def plain_token(backend: Any, special_ids: frozenset[int]) -> int:
    """Return a token of ordinary text: a token decoded after it keeps its leading space."""
    for text in ("a", "the", "1", "."):
        for token_id in reversed(backend.encode(text, add_special_tokens=False).ids):
            if token_id not in special_ids and backend.decode([token_id], skip_special_tokens=True).strip():
                return int(token_id)
    raise ValueError("it has no token for ordinary text")


def _names(backend: Any) -> list[str]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    names = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        names[token_id] = token
    return names


def _try(backend: Any, ids: Sequence[int], table: Sequence[bytes], anchor: int) -> None:
    """Compare random texts with the tokenizer's own decoder, which may look at more than one token.

    Only tokens of whole characters are compared, because runs of byte tokens are decoded together.
    """
    draw = random.Random(0)
    whole = [i for i in ids if _is_text(table[i])]
    for _ in range(TRIALS):
        some = draw.choices(whole or [anchor], k=TRIAL_TOKENS)
        text = backend.decode([anchor, *some, anchor], skip_special_tokens=False)
        if text.encode() != backend.decode([anchor]).encode() + b"".join(table[i] for i in some) + table[anchor]:
            raise ValueError("its decoder makes a text of tokens that depends on more than each of them")


def _is_text(data: bytes) -> bool:
    try:
        return "\ufffd" not in data.decode()
    except UnicodeDecodeError:
        return False


def _byte_characters() -> dict[int, str]:
    """Return GPT-2's table: printable Latin-1 bytes stand for themselves, the others for characters from U+0100 on."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in kept}
    others = [byte for byte in range(256) if byte not in table]
    table.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return table
