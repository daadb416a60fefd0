"""Download saved models from remote stores into the cache (``serving.downloads``), each file verified by its SHA-256.

A model's key there is made of its content hash and of the bytes of its two descriptions, ``manifest.json`` and
``MLmodel``, which alone are fetched to see whether the model is there already. A file that another model in the cache
has, such as the weights of a base that was logged again with an adapter, is linked instead of downloaded.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ....serving.interface.errors import PackagingError
from ....serving.model_files import downloads
from ....serving.system.files import sync_directory
from ....serving.system.step_line import StepLine, watched
from . import manifest as manifests
from .manifest import FileEntry, Manifest
from .names import MLMODEL

MAX_CONCURRENT_DOWNLOADS = 4  # files
SCRATCH = ".scratch-"
TEXTS = "-texts"  # of the key of a model without its weights
DESCRIPTIONS = (manifests.MANIFEST, MLMODEL)


def downloaded(uri: str, store: Any, *, weights: bool = True) -> Path:
    """Return the cached root of the model at ``uri``, whose MLflow artifact repository is ``store``.

    Raises ``PackagingError`` for a model that is damaged or not this flavor's, and what the store's client raises.
    """
    with tempfile.TemporaryDirectory(prefix="mlflow-llm-") as scratch, _without_bars():
        described = Path(scratch)
        for name in DESCRIPTIONS:
            _fetch_description(uri, store, name, described)
        manifest = manifests.read(described)
        fill = functools.partial(_fill, uri, store, manifest, described, weights)
        return downloads.entry(_key(manifest, described, weights=weights), fill, uri)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Turn off MLflow's progress bars, one for each file, unless the user has asked for them."""
    name = "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"
    if name in os.environ:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def taken_over(root: Path) -> Path:
    """Return the cached root of the model that MLflow downloaded to ``root``, whose files are moved to the cache.

    Raises ``PackagingError``, ``OSError``.
    """
    manifest = manifests.read(root)
    return downloads.entry(_key(manifest, root, weights=True), functools.partial(_move, root, manifest))


def _key(manifest: Manifest, described: Path, *, weights: bool) -> str:
    both = hashlib.sha256()
    for name in DESCRIPTIONS:
        both.update(hashlib.sha256((described / name).read_bytes()).digest())
    return f"{manifest.content_hash[:32]}-{both.hexdigest()[:32]}{'' if weights else TEXTS}"


def _fetch_description(uri: str, store: Any, name: str, target: Path) -> None:
    try:
        _fetch(store, name, target, target / name)
    except Exception:
        names = {Path(found.path).name for found in store.list_artifacts("")}  # raises if the store is what failed
        if name not in names and MLMODEL in names:
            raise PackagingError(f"{name} is missing in {uri}: this is not a model saved by mlflow-llm") from None
        raise


def _fetch(store: Any, name: str, scratch: Path, target: Path) -> None:
    """Download one file. Some stores put it below more folders than asked for, so it is moved to its place."""
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=scratch) as folder:
        found = store.download_artifacts(name, dst_path=folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(found, target)


def _files(manifest: Manifest, described: Path, *, weights: bool) -> dict[str, FileEntry]:
    """Return the files that a download consists of, besides the descriptions."""
    if weights:
        return manifest.files | ({} if manifests.has_libraries(described) else manifest.environment or {})
    return {path: entry for path, entry in manifest.files.items() if not manifests.is_weights(path)}


def _fill(uri: str, store: Any, manifest: Manifest, described: Path, weights: bool, part: Path) -> None:
    files = _files(manifest, described, weights=weights)
    missing = _continued(part, files)
    _link(part, missing)
    size = sum(entry.size for entry in missing.values())
    downloads.make_room(size)
    began = size_of(part)
    with (
        watched(StepLine(), f"downloading {uri} into {part.parent}", lambda: size_of(part) - began, size),
        ThreadPoolExecutor(MAX_CONCURRENT_DOWNLOADS, thread_name_prefix="mlflow-llm-download") as pool,
    ):
        work = [pool.submit(_fetch_verified, store, path, entry, part) for path, entry in missing.items()]
        try:
            for one in work:
                one.result()
        finally:
            pool.shutdown(cancel_futures=True)
    _finish(described, part)


def size_of(folder: Path) -> int:
    """Return the bytes of all files in ``folder``, some of which may be moved or removed meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def _fetch_verified(store: Any, path: str, entry: FileEntry, part: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=part) as folder:
        file = Path(folder, "file")
        _fetch(store, path, Path(folder), file)
        manifests.check_file(file, path, entry, full=True)
        _sync(file)
        (part / path).parent.mkdir(parents=True, exist_ok=True)
        file.replace(part / path)  # a name in ``part`` is always of a whole file


def _continued(part: Path, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
    """Return the files that an earlier attempt has not brought; what it left besides is removed."""
    missing = dict(files)
    for found in list(part.iterdir()):
        if found.name.startswith(SCRATCH):
            shutil.rmtree(found)
    for found in [found for found in part.rglob("*") if not found.is_dir()]:
        path = found.relative_to(part).as_posix()
        try:
            manifests.check_file(found, path, files[path], full=True)
            del missing[path]
        except (KeyError, PackagingError):
            found.unlink()
    return missing


def _link(part: Path, missing: dict[str, FileEntry]) -> None:
    """Link the files that another download has, and take them out of ``missing``."""
    known = {(entry.sha256, entry.size): file for entry, file in _known(part.parent)}
    for path, entry in list(missing.items()):
        source = known.get((entry.sha256, entry.size))
        if source is None:
            continue
        with contextlib.suppress(OSError):  # it has just been removed, or this file system has no links
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            os.link(source, part / path)
            del missing[path]


def _known(place: Path) -> Iterator[tuple[FileEntry, Path]]:
    for description in place.glob(f"*/{manifests.MANIFEST}"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, PackagingError):
            for path, entry in json.loads(description.read_bytes())["files"].items():
                file = description.parent / path
                if file.stat().st_size == entry["size"]:
                    yield FileEntry(size=entry["size"], sha256=entry["sha256"]), file


def _move(root: Path, manifest: Manifest, part: Path) -> None:
    files = _files(manifest, root, weights=True)
    missing = _continued(part, files)
    _link(part, missing)
    if os.stat(root).st_dev != os.stat(part).st_dev:
        downloads.make_room(sum(entry.size for entry in missing.values()))
    for path, entry in missing.items():
        manifests.check_file(root / path, path, entry, full=True)
        (part / path).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(root / path, part / path)
        except OSError:  # another file system
            with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=part) as folder:
                copied = Path(folder, "file")
                shutil.copyfile(root / path, copied)
                _sync(copied)
                copied.replace(part / path)
    downloads.make_room(0)
    _finish(root, part)


def _finish(described: Path, part: Path) -> None:
    for name in DESCRIPTIONS:
        shutil.copyfile(described / name, part / name)
        _sync(part / name)
    sync_directory(part)


def _sync(file: Path) -> None:
    """Write a file to the disk: later loads check only its size, which a power failure may leave right."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
