"""The package's own files: where its directories are, and how to write a file that other processes read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

CACHE_VARIABLE = "MLFLOW_LLM_CACHE"
STATE_VARIABLE = "MLFLOW_LLM_STATE"
PLACE_VARIABLES = (CACHE_VARIABLE, STATE_VARIABLE)
"""Of directories; a relative one is meant from the working directory of the process that it was given to."""


def cache_dir(part: str) -> Path:
    """Return the directory of ``part`` in the user's cache, which need not exist.

    The cache is ``$MLFLOW_LLM_CACHE``, else ``$XDG_CACHE_HOME/mlflow-llm``, else ``~/.cache/mlflow-llm``. Raises
    ``OSError`` for a user without a home directory, for example in a container that runs under a bare user id.
    """
    given = os.environ.get(CACHE_VARIABLE)
    try:
        user = xdg_dir("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    except RuntimeError:
        if not given:
            raise OSError(f"this user has no home directory; {CACHE_VARIABLE} names a cache") from None
        user = Path()
    return (Path(given).absolute() if given else user / "mlflow-llm") / part


def xdg_dir(variable: str) -> Path | None:
    """Return the directory that an XDG variable names; a relative path is ignored (XDG Base Directory
    Specification)."""
    path = Path(os.environ.get(variable) or ".")
    return path if path.is_absolute() else None


def is_private(found: os.stat_result) -> bool:
    """Return whether a file or directory belongs to this user and is closed to all others."""
    return found.st_uid == os.geteuid() and not found.st_mode & 0o077


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` to ``path``, readable only by its owner: ``replacing`` in one call."""
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, suffix: str = "", mode: int = 0o600) -> Iterator[BinaryIO]:
    """Open a file for writing that becomes ``path`` at the end of the block, whole or not at all (write, then rename).

    Readers in other processes see the old file or the new one, even if this process is killed. ``suffix`` names the
    draft; the default contains the process id, so that several processes may write at once, but not two threads of one.
    A draft left by a killed process is overwritten. If the block raises, the old file stays and the draft is removed.
    Raises ``OSError``.
    """
    draft = f"{os.fspath(path)}{suffix or f'.{os.getpid()}.new'}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(draft)
    try:
        with open(draft, "xb", opener=_private) as file:
            if mode != 0o600:
                os.fchmod(file.fileno(), mode)
            yield file
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make renames in the directory ``path`` survive a power failure. Raises ``OSError``."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


class Renewals:
    """A detector of whether files were replaced or rewritten since they were last checked; None stands for no file."""

    def __init__(self, *paths: str | None) -> None:
        self._paths = paths
        self._seen = self._stamps()

    def look(self) -> bool:
        before, self._seen = self._seen, self._stamps()
        return self._seen != before

    def _stamps(self) -> list[tuple[int, int] | None]:
        return [stamp(path or "") for path in self._paths]


def stamp(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return a value that changes when the file does; None if the file cannot be examined."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
