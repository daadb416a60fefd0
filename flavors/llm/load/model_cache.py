"""The user's cache of logged models, in which ``serve -m`` and ``chat -m`` log a model that is not logged yet."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from pathlib import Path

from .... import __version__
from ....serving.interface.errors import PackagingError
from ....serving.model_files import cached_copies
from ....serving.model_files.downloads import check_owner
from ....serving.system.step_line import StepLine, watched
from ..model.fetch import local_root
from ..model.hub import fetch_snapshot
from ..model.unlogged_source import source_of


def logged_root(uri: str) -> Path:
    """Return the local root of the model at ``uri``; a model that is not logged yet is logged into the cache.

    Raises ``PackagingError``, ``ModelNotFound``.
    """
    return logged(uri) or local_root(uri)


def logged(uri: str) -> Path | None:
    """Return the cached root of a model that is not logged yet, logging it if needed; None for any other ``uri``.

    A copy is keyed by the names, sizes and times of the source's files and by this package's version. Its weights are
    hard links to the source's if the file system allows. Keys can be guessed, so the cache must be in a place where no
    other user could have put a model. Raises ``PackagingError``.
    """
    source = source_of(uri)
    if source is None:
        return None
    if isinstance(source, str):
        source = fetch_snapshot(source, None)
    target = cached_copies.place() / f"{_readable(uri)}-{_fingerprint(source)}"
    check_owner(target.parent)
    if not target.is_dir():
        _save(source, target, uri)
        cached_copies.trim(keep=target)
    check_owner(target)
    cached_copies.mark_used(target)
    return target


def _save(source: Path, target: Path, uri: str) -> None:
    """Save atomically: written whole or not at all. If several processes save at once, the first copy stays."""
    from ..save.save_model import save_model

    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unfinished-") as scratch:
            with watched(StepLine(), f"logging {uri} into {target}", lambda: 0, 0):
                save_model(Path(scratch) / "model", model=source, link_files=True)
            (Path(scratch) / "model").chmod(0o700)
            with contextlib.suppress(OSError):
                (Path(scratch) / "model").rename(target)
        if not target.is_dir():
            raise PackagingError(f"{target} was not written")
    except OSError as error:
        reason = error.strerror or error
        if error.filename is not None and not Path(os.fsdecode(error.filename)).is_relative_to(target.parent):
            raise PackagingError(f"{uri} cannot be read: {os.fsdecode(error.filename)}: {reason}") from None
        raise PackagingError(f"{uri} cannot be logged into {target.parent}: {reason}") from None


def _readable(uri: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(uri).name or "model").strip(".-")[:40] or "model"


def _fingerprint(source: Path) -> str:
    source = source.resolve()
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    digest = hashlib.sha256(f"{__version__}\n{source}\n".encode())
    for path in files:
        found = path.stat()
        digest.update(f"{path.relative_to(source.parent)}\n{found.st_size}\n{found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
