"""What is no logged model yet: a Hugging Face directory, a GGUF file, a hub id. What to say of it where a model is
expected, and, for the commands that take one directly, how it is logged into a cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import sys
import tempfile
from pathlib import Path

from ... import __version__
from ...serving.errors import ModelNotFound, PackagingError, shown
from ...serving.files import CACHE_VARIABLE, cache_dir
from .manifest import MANIFEST
from .sources import HUB_ID, fetch_from_hub

PLACE = "models"  # in the cache
SOURCES = ("config.json", "modules.json")


def source_of(uri: str) -> str | Path | None:
    """``uri`` as what could be logged: a directory, a GGUF file or a hub id; None for what is something else."""
    path = Path(uri).expanduser()
    if path.is_dir():
        found = not (path / MANIFEST).is_file() and any((path / name).is_file() for name in SOURCES)
        return path if found else None
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" else None
    return uri if "/" in uri and HUB_ID.fullmatch(uri) else None


def must_be_logged(uri: str) -> None:
    """Raises ``PackagingError`` or ``ModelNotFound``, which say how it is logged, for what is not."""
    source = source_of(uri)
    how = f"log it first, with llm.log_model(model={uri!r}, …) or llm.save_model(path, model={uri!r})"
    directly = f"or serve it as it is: mlflow-llm serve -m {uri}"
    if isinstance(source, Path):
        kind = "a Hugging Face directory" if source.is_dir() else "a GGUF file"
        raise PackagingError(f"{shown(uri)} is {kind}, not a logged model: {how}, {directly}")
    path = Path(uri).expanduser()
    if source is not None:
        raise ModelNotFound(f"there is no directory {shown(uri)} here; should it be a hub id: {how}, {directly}")
    if path.is_dir() and (path / "adapter_config.json").is_file():
        raise PackagingError(
            f"{shown(uri)} is a LoRA adapter, not a logged model: log it over its base, with"
            f' llm.log_model(base="models:/<name>/<version>", adapters={{"name": {uri!r}}}, …)'
        )
    if not path.exists() and ":" not in uri.split("/")[0]:
        raise ModelNotFound(f"there is no directory {shown(uri)}; expected one, models:/<name>/<version>, or a hub id")


def logged(uri: str) -> Path | None:
    """The saved model of a source, made now or by an earlier call; None for what is no source.

    A copy is found again by what the source's files are called, by their sizes and times, and by this package's
    version; its weights are links to the source's where the file system allows. What it is called anyone can work out,
    so it has to be where no other user could have put one. Raises ``PackagingError``.
    """
    source = source_of(uri)
    if source is None:
        return None
    if isinstance(source, str):
        source = fetch_from_hub(source, None)
    target = cache_dir(PLACE) / f"{_readable(uri)}-{_fingerprint(source)}"
    _check_ours(target.parent)
    if not target.is_dir():
        _save(source, target, uri)
    _check_ours(target)
    return target


def _check_ours(path: Path) -> None:
    """Raises ``PackagingError`` for what another user than root owns, or may write to. Harmless before it is there."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = path.lstat()
        private = stat.S_ISDIR(found.st_mode) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if found.st_uid not in (0, os.geteuid()) or not private:
            raise PackagingError(
                f"{path}: models are not taken from a directory that other users could have written;"
                f" remove it, or set {CACHE_VARIABLE} to one of your own"
            )


def _save(source: Path, target: Path, uri: str) -> None:
    """Whole or not at all, also when several processes come at once: the first one's copy stays."""
    from .save import save_model

    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unfinished-") as scratch:
            print(f"logging {uri} into {target}", file=sys.stderr, flush=True)
            save_model(Path(scratch) / "model", model=source, link_files=True)
            (Path(scratch) / "model").chmod(0o700)
            with contextlib.suppress(OSError):
                (Path(scratch) / "model").rename(target)
        if not target.is_dir():
            raise PackagingError(f"{target} was not written")
    except OSError as error:
        raise PackagingError(f"{uri} cannot be logged into {target.parent}: {error.strerror or error}") from None


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
