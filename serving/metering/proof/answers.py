"""Hashes of what was asked and answered, and the settings that decide an answer, kept with its row.

All hashes are HMACs whose key only the store can make, another one for each request: whoever reads the ledger can
neither guess a short prompt nor see that two requests were the same.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ...interface.reply import Delta
from ...interface.request import Sampling, ValidRequest

MAX_CHOICES = 16
"""Replies with more choices are not hashed, which bounds the row."""
MAX_SETTINGS = 2000  # bytes of JSON
_NUMBERS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty",
)  # fmt: skip
_COMPLEX = (
    "logit_bias", "logprobs", "prompt_logprobs", "grammar", "beams", "bad_words", "stop_sequences",
    "no_repeat_ngram_size", "embedding_bias", "penalize_prompt", "draft",
)  # fmt: skip
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Sampling)}


class Asked(Struct, frozen=True, kw_only=True):
    """The parts of a request that decide its answer.

    ``body`` and ``prompt`` are digests of the body and of the token ids. ``settings`` are fields of OpenAI's API with
    their final values, None if the request has others too, so that only its body repeats it. ``computed`` says how the
    model was computed.
    """

    route: str
    body: bytes
    prompt: bytes
    seed: int
    settings: dict[str, Any] | None
    computed: dict[str, str]


class Proof(Struct, frozen=True, kw_only=True):
    """The record of ``Asked`` in a row of the ledger, with keyed hashes."""

    route: str
    body: str
    prompt: str
    seed: int
    settings: dict[str, Any] | None = None
    computed: dict[str, str] = {}


class Said(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The keyed hashes of a choice; empty for what it does not have."""

    text: str = ""
    reasoning: str = ""
    calls: str = ""


def asked_of(valid: ValidRequest, *, route: str, body: bytes, computed: Mapping[str, str]) -> Asked | None:
    """Return what ``valid`` asked; None for a request that generates nothing. ``body`` is the digest of its body."""
    if valid.sampling is None:
        return None
    return Asked(
        route=route,
        body=body,
        prompt=prompt_digest([one.prompt_token_ids for one in valid.sequences[:: valid.n]]),
        seed=valid.sequences[0].seed,
        settings=_settings(valid, valid.sampling),
        computed=dict(computed),
    )


def _settings(valid: ValidRequest, sampling: Sampling) -> dict[str, Any] | None:
    """Return the settings under OpenAI's names, which repeat the answer to the same prompt; None if they do not."""
    if any(getattr(sampling, name) != _DEFAULTS[name] for name in _COMPLEX):
        return None
    if valid.tools or valid.lora_task or valid.prompt_table or valid.images or len(valid.sequences) != valid.n:
        return None
    settings: dict[str, Any] = {name: getattr(sampling, name) for name in _NUMBERS}
    if valid.n > 1:
        settings["n"] = valid.n
    if valid.stop:
        settings["stop"] = list(valid.stop)
    return settings if len(msgspec.json.encode(settings)) <= MAX_SETTINGS else None


def prompt_digest(prompts: Iterable[Sequence[int]]) -> bytes:
    """Return the SHA-256 of prompts: for each its length and its token ids, as little-endian uint32."""
    digest = hashlib.sha256()
    for ids in prompts:
        digest.update(struct.pack(f"<{len(ids) + 1}I", len(ids), *ids))
    return digest.digest()


def body_digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


def request_key(hashing: bytes, request_id: str) -> bytes:
    """Return the key of one request's hashes."""
    return hmac.digest(hashing, request_id.encode(), "sha256")


def keyed(key: bytes, digest: bytes) -> str:
    return hmac.digest(key, digest, "sha256").hex()


def proof_of(asked: Asked, key: bytes) -> Proof:
    """Return what the row keeps of ``asked``; ``key`` is that of the request."""
    return Proof(
        route=asked.route,
        body=keyed(key, asked.body),
        prompt=keyed(key, asked.prompt),
        seed=asked.seed,
        settings=asked.settings,
        computed=asked.computed,
    )


class _Choice:
    __slots__ = ("calls", "reasoning", "text")

    def __init__(self) -> None:
        self.text, self.reasoning, self.calls = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()


_EMPTY = hashlib.sha256().digest()


class OutputHashes:
    """The hashes of a reply's choices, fed with the pieces that the caller gets, however they are divided."""

    __slots__ = ("_choices", "_key")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._choices: dict[int, _Choice] = {}

    def add(self, delta: Delta) -> None:
        """Add a piece of a choice."""
        choice = self._choice(delta.index)
        if delta.text:
            choice.text.update(delta.text.encode(errors="surrogatepass"))
        if delta.reasoning:
            choice.reasoning.update(delta.reasoning.encode(errors="surrogatepass"))
        for call in delta.calls:
            if call.name is not None:
                choice.calls.update(b"\0" + call.name.encode() + b"\0")
            choice.calls.update(call.arguments.encode(errors="surrogatepass"))

    def add_text(self, index: int, text: str) -> None:
        """Add a piece that is only text."""
        self._choice(index).text.update(text.encode(errors="surrogatepass"))

    def _choice(self, index: int) -> _Choice:
        found = self._choices.get(index)
        if found is None:
            found = self._choices[index] = _Choice()
        return found

    def said(self) -> list[Said] | None:
        """Return the hashes of all choices so far; None if there are too many."""
        if len(self._choices) > MAX_CHOICES:
            return None
        return [self._said(self._choices[index]) for index in sorted(self._choices)]

    def _said(self, choice: _Choice) -> Said:
        digests = {name: getattr(choice, name).digest() for name in ("text", "reasoning", "calls")}
        kept = {name: keyed(self._key, one) for name, one in digests.items() if one != _EMPTY or name == "text"}
        return Said(**kept)


def text_hash(key: bytes, text: str) -> str:
    """Return the hash of a whole text of the request with this ``key``, as ``Said`` has it."""
    return keyed(key, hashlib.sha256(text.encode(errors="surrogatepass")).digest())
