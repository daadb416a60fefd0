"""A cache of the names that transformers' models export, kept from one engine's start to the next.

``import transformers`` finds the names of its models by reading some 1,500 source files, and
``import transformers.models`` reads them again. Together this is a fifth of the time of an engine's imports. The result
is kept in the user's cache, keyed by the names, sizes and times of these files, so a changed file is read again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import marshal
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ...system.files import cache_dir, is_private, replace_file, stamp

logger = logging.getLogger(__name__)

PACKAGE = "transformers"
READER = "transformers.utils.import_utils"  # the module that reads the sources
READ = "create_import_structure_from_path"  # its function: a file or directory -> names by file and requirement
CACHE_PART = "exports"


@contextlib.contextmanager
def used() -> Iterator[None]:
    """Let the first import of transformers, if it happens in this block, use the cache.

    In every other case, and if the cache cannot be read or written, transformers reads its sources."""
    if PACKAGE in sys.modules:
        yield
        return
    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class Finder:
    """An import hook that finds the module that reads the sources, and wraps its function in the cache once the module
    has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != READER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_then_cache(module: ModuleType) -> None:
                run(module)
                if callable(read := getattr(module, READ, None)):
                    setattr(module, READ, functools.partial(kept, read, {}))

            spec.loader.exec_module = run_then_cache  # type: ignore[method-assign]
        return spec


def kept(read: Callable[[Any], Any], found: dict[str, Any], place: str | os.PathLike[str]) -> Any:
    """Return ``read(place)``. For the directory of all models the result may come from ``found`` or the cache."""
    folder = os.fspath(place)
    if not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    if os.path.basename(folder) != "models" or os.path.basename(os.path.dirname(folder)) != PACKAGE:
        return read(place)
    if folder not in found:
        structure = None
        try:
            path = cache_dir(CACHE_PART) / f"{_fingerprint(folder)}.marshal"
            structure = _load(path)
            if structure is None:
                structure = read(place)
                _store(path, structure)
        except (OSError, ValueError) as error:
            logger.info("the exports of transformers' models are not cached and are read at every start: %s", error)
            if structure is None:
                structure = read(place)
        found[folder] = structure
    return found[folder]


def _fingerprint(folder: str) -> str:
    """Return a digest of the names, sizes and times of all sources below ``folder``, of the file that reads them, and
    of this interpreter's version, since marshal's format depends on it."""
    reader = os.path.join(os.path.dirname(folder), "utils", "import_utils.py")
    said = [sys.version, folder, *_stamps(folder)]
    if (own := stamp(reader)) is not None:
        said.append(repr(own))
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:32]


def _stamps(folder: str) -> Iterator[str]:
    """Yield name, size and time of each source below ``folder``, in a fixed order."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.endswith(".py"):
                found = entry.stat()
                yield f"{entry.name} {found.st_size} {found.st_mtime_ns}"
            elif entry.name != "__pycache__" and entry.is_dir():
                yield entry.name
                yield from _stamps(entry.path)


def _load(path: Path) -> dict[Any, Any] | None:
    """Load ``path``, which only this user may have been able to write; None if there is nothing to use."""
    try:
        with open(path, "rb") as file:
            structure = marshal.load(file) if is_private(os.fstat(file.fileno())) else None
    except (FileNotFoundError, EOFError, ValueError, TypeError):
        return None
    return structure if isinstance(structure, dict) else None


def _store(path: Path, structure: Any) -> None:
    """Write ``structure`` to ``path``. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_file(path, marshal.dumps(structure))
