"""Files of this package's own: where its directories are, and how one is written that others read."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CACHE_VARIABLE = "MLFLOW_LLM_CACHE"
STATE_VARIABLE = "MLFLOW_LLM_STATE"
PLACE_VARIABLES = (CACHE_VARIABLE, STATE_VARIABLE)
"""Of directories; a relative one is meant from the working directory of the process that it was given to."""


def cache_dir(part: str) -> Path:
    """Where ``part`` of the user's cache is: below ``$MLFLOW_LLM_CACHE``, else ``$XDG_CACHE_HOME/mlflow-llm``, else
    ``~/.cache/mlflow-llm``. It need not be there."""
    given = os.environ.get(CACHE_VARIABLE)
    user = xdg_dir("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return (Path(given).absolute() if given else user / "mlflow-llm") / part


def xdg_dir(variable: str) -> Path | None:
    """What an XDG variable names; a relative path is to be ignored (XDG Base Directory Specification)."""
    path = Path(os.environ.get(variable) or ".")
    return path if path.is_absolute() else None


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
