"""Files of this package's own: where its cache is, and how one is written that others read."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CACHE_VARIABLE = "MLFLOW_LLM_CACHE"


def cache_dir(part: str) -> Path:
    """Where ``part`` of the user's cache is: below ``$MLFLOW_LLM_CACHE``, else ``$XDG_CACHE_HOME/mlflow-llm``, else
    ``~/.cache/mlflow-llm``. It need not be there."""
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    given = os.environ.get(CACHE_VARIABLE)
    return (Path(given) if given else Path(user).expanduser() / "mlflow-llm") / part


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """``path`` has ``data``, for its owner alone: whole or not at all, for readers in other processes and whenever its
    writer is killed. Not for two threads at once. Raises ``OSError``, with the old file as it was."""
    draft = f"{os.fspath(path)}.{os.getpid()}.new"
    try:
        with open(draft, "wb", opener=_private) as file:
            file.write(data)
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
