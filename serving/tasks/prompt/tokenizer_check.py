"""Checks, before a tokenizer is loaded into this process, that loading it and encoding a text stay within limits.

Normalizers, regular expressions of pre-tokenizers and post-processors come with a model. One that backtracks for ever,
or makes a million tokens of a word, would do that in every worker that serves the model.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ...interface.errors import PackagingError
from ...sandbox import CHECK, POOL, Ended, Exceeded, NoProcess, Refused

FILE = "tokenizer.json"
MAX_BYTES = 512 << 20
MAX_TOKENS = 16  # per character; byte-level tokenizers make at most four
MAX_ADDED = 1024  # tokens added around a text
# Runs of one character and alternations of two characters make regular expressions backtrack.
PROBES = (
    "",
    "The quick brown fox jumps over 13 lazy dogs, doesn't it?\n" * 20,
    *(2000 * text for text in "a 1\n\t.(<_é你"),
    *(1000 * text for text in ("a ", "a1", "1,", " \n", "'s", "aA", "ab", "😀")),
    2000 * "a" + "!",
)


def check_tokenizer(directory: str | Path) -> None:
    """Raise ``PackagingError``, which names the file, if a limit is exceeded or the file cannot be read.

    Without a tokenizer.json there is nothing to check.
    """
    file = Path(directory, FILE)
    try:
        found = file.stat()
    except OSError:
        return
    if found.st_size > MAX_BYTES:
        raise PackagingError(f"{FILE}: {found.st_size} bytes; at most {MAX_BYTES} are allowed")
    _check(str(file.absolute()), found.st_ino, found.st_size, found.st_mtime_ns)


def check_fast(tokenizer: Any) -> None:
    """Raise ``PackagingError`` for a tokenizer that is written in Python, which this package does not run."""
    if not getattr(tokenizer, "is_fast", False):
        raise PackagingError(
            f"tokenizer: {type(tokenizer).__name__} has no fast form (tokenizer.json), which serving needs; convert it,"
            " if transformers can, or train one of the library tokenizers"
        )


@functools.lru_cache(maxsize=256)
def _check(path: str, *state: int) -> None:
    """Check the file; the cache makes this happen once for each ``state`` (inode, size, modification time)."""
    try:
        counts = POOL.run("tokenizer", CHECK, path=path, probes=PROBES)
    except Refused as error:
        raise PackagingError(f"{FILE}: it cannot be read: {error.reason}") from None
    except (Exceeded, Ended, NoProcess) as error:
        raise PackagingError(f"{FILE}: it was stopped: a short text took {error}") from None
    for probe, count in zip(PROBES, counts, strict=True):
        if count > MAX_ADDED + MAX_TOKENS * len(probe):
            raise PackagingError(f"{FILE}: it makes {count} tokens of {len(probe)} characters")
