"""A request's fields about single tokens in the form that an engine takes: bad words, stop sequences, biases and
end-of-text tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..interface.errors import InvalidField
from ..interface.request import RawSampling
from .prompt.endpoint import EndpointView
from .prompt.text import TextModel

MAX_BAD_WORDS = 1024
MAX_BAD_CHARS = 65_536
MAX_BAD_TOKENS = 16_384  # of all bad words together
MAX_BIAS = 1e9  # adding a larger number in float32 would lose the logit that it is added to
ITEM_BYTES = 4  # bytes of a float32


def bad_words(asked: RawSampling, endpoint: EndpointView) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that must never be generated: for a text, each way of spelling it in tokens.

    Raises ``InvalidField``.
    """
    given = asked.bad_words or ()
    if len(given) > MAX_BAD_WORDS:
        raise InvalidField("bad_words", f"{len(given)} words", f"at most {MAX_BAD_WORDS}")
    if (size := sum(len(word) for word in given if isinstance(word, str))) > MAX_BAD_CHARS:
        raise InvalidField("bad_words", f"{size} characters", f"at most {MAX_BAD_CHARS} in total")
    texts = [word for word in given if isinstance(word, str)]
    spelt = iter(spellings(texts, endpoint.text) if texts else ())
    runs: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(given):
        found = next(spelt) if isinstance(word, str) else (word,)
        if not found:
            raise InvalidField(f"bad_words[{i}]", word, "a text that is not only spaces")
        for run in found:
            _check_run(run, f"bad_words[{i}]", word, endpoint.info.vocab_size)
            runs[run] = None
    if (total := sum(map(len, runs))) > MAX_BAD_TOKENS:
        raise InvalidField("bad_words", f"{total} tokens", f"at most {MAX_BAD_TOKENS} in total")
    return tuple(runs)


def spellings(words: Sequence[str], text: TextModel) -> list[tuple[tuple[int, ...], ...]]:
    """Return the token sequences of each word; () for a word of spaces alone.

    A word is encoded at the beginning of a text, after a space, and within a line. The first two are as in vLLM, which
    keeps the second only if it has as many tokens. The third differs for tokenizers that put a space before a text.
    """
    bare = [word.lstrip() for word in words]
    ways = [before + word for word in bare for before in ("", " ", "\n")]
    newline, *encoded = text.encode_plain(["\n", *ways], MAX_BAD_CHARS)
    found: list[tuple[tuple[int, ...], ...]] = []
    for i, word in enumerate(bare):
        first, spaced, lined = encoded[3 * i : 3 * i + 3]
        begins = bool(newline) and lined[: len(newline)] == newline
        runs = (first, spaced, lined[len(newline) :] if begins else ())
        found.append(tuple(dict.fromkeys(run for run in runs if run)) if word else ())
    return found


def stop_sequences(asked: RawSampling, endpoint: EndpointView) -> tuple[tuple[int, ...], ...]:
    """Return the request's stop sequences without duplicates. Raises ``InvalidField``."""
    profile, given = endpoint.profile, asked.stop_sequences or ()
    if len(given) > profile.max_stop_strings:
        raise InvalidField("stop_sequences", f"{len(given)} sequences", f"at most {profile.max_stop_strings}")
    if (total := sum(map(len, given))) > profile.max_stop_chars:
        raise InvalidField("stop_sequences", f"{total} tokens", f"at most {profile.max_stop_chars} in total")
    for i, run in enumerate(given):
        _check_run(run, f"stop_sequences[{i}]", run, endpoint.info.vocab_size)
    return tuple(dict.fromkeys(given))


def _check_run(run: tuple[int, ...], path: str, given: object, vocab_size: int) -> None:
    if not run or min(run) < 0 or max(run) >= vocab_size:
        raise InvalidField(path, given, f"at least one token id, from 0 to {vocab_size - 1}")


def end_ids(asked: RawSampling, endpoint: EndpointView) -> tuple[int, ...]:
    """Return the end-of-text tokens: the model's, or the one that the request gives instead. Raises
    ``InvalidField``."""
    end_id = asked.end_id
    own_end = end_id is not None and end_id != -1
    if end_id is not None and not -1 <= end_id < endpoint.info.vocab_size:
        raise InvalidField("end_id", end_id, f"-1 for the model's own, or a token id below {endpoint.info.vocab_size}")
    if not asked.ignore_eos:
        return (end_id,) if own_end and end_id is not None else endpoint.text.eos_token_ids
    if own_end:
        raise InvalidField("end_id", end_id, "-1 or null with ignore_eos, which ends the text at neither")
    return ()


def embedding_bias(given: bytes | None, vocab_size: int) -> bytes | None:
    """Check the bias and return it unchanged; None if it changes nothing. -inf forbids a token.

    Raises ``InvalidField``.
    """
    if given is None:
        return None
    if len(given) != ITEM_BYTES * vocab_size:
        found = f"{len(given) // ITEM_BYTES} numbers" if len(given) % ITEM_BYTES == 0 else f"{len(given)} bytes"
        raise InvalidField("embedding_bias", found, f"a number for each of {vocab_size} tokens")
    values = np.frombuffer(given, dtype="<f4")
    wrong = np.flatnonzero(~(values <= MAX_BIAS))  # NaN compares false
    if len(wrong):
        raise InvalidField(f"embedding_bias[{wrong[0]}]", float(values[wrong[0]]), f"at most {MAX_BIAS:g}, or -inf")
    if np.isneginf(values).all():
        raise InvalidField("embedding_bias", "-inf for every token", "a number for one of them at least")
    return given if values.any() else None
