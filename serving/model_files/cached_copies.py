"""The part of the cache with models that were logged on the fly; those unused for longest leave when it is full.

A copy's weights are hard links to its source's where the file system allows, so most copies take no room of their own
until the source is removed. The time of a copy's folder is when it was last taken into use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ..system.files import cache_dir
from ..system.sizes import readable
from .cache_limit import limit_of

logger = logging.getLogger(__name__)

PLACE = "models"
LIMIT_VARIABLE = "MLFLOW_LLM_COPIES_LIMIT"
SPARED_SECONDS = 86_400.0  # an engine may be about to read a copy that was used a moment ago


def place() -> Path:
    """Return the directory of the copies, which need not exist. Raises ``OSError`` as ``cache_dir`` does."""
    return cache_dir(PLACE)


def entries() -> Iterator[tuple[Path, int, float]]:
    """Yield folder, bytes and last use of each copy."""
    with contextlib.suppress(FileNotFoundError):
        for path in place().iterdir():
            with contextlib.suppress(OSError):
                if path.is_dir() and not path.name.startswith("."):
                    files = [file.lstat().st_size for file in path.rglob("*") if not file.is_dir()]
                    yield path, sum(files), path.stat().st_mtime


def mark_used(path: Path) -> None:
    """Note that a copy is taken into use now."""
    with contextlib.suppress(OSError):  # of a cache that cannot be written nothing is removed either
        os.utime(path)


def trim(keep: Path) -> None:
    """Remove the copies unused for longest until all are within the limit, but none used within a day, nor ``keep``."""
    found = sorted(entries(), key=lambda one: one[2])
    total, maximum = sum(size for _, size, _ in found), limit_of(LIMIT_VARIABLE)
    for path, size, used in found:
        if total <= maximum:
            return
        if path != keep and time.time() - used > SPARED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
            total -= size
            logger.info("removed %s, %s, from the cache of copies", path.name, readable(size))
    if total > maximum:
        logger.warning(
            "the copies in use have %s, more than %s allows: %s", readable(total), LIMIT_VARIABLE, readable(maximum)
        )
