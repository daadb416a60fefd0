"""The files from which packed weights are made, and their comparison with the model's manifest.

A model is identified by the hashes in its manifest, but a load usually compares only file sizes. Weights from a damaged
file must not be cached under the name of the intact model, since every load of that model would then use them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ....interface.bundle import Bundle

State = tuple[int, ...]


class PackedSource:
    """The files in ``model_dir``. Make it before any of them is read."""

    def __init__(self, bundle: Bundle) -> None:
        """Record the state of the files. Raises ``OSError`` if one is missing."""
        folder = Path(bundle.model_dir)
        self._hashes = {folder / path: expected for path, expected in bundle.model_hashes.items()}
        self._states = {file: _state(file) for file in self._hashes}

    def check(self) -> None:
        """Hash the files. Raises ``ValueError``, naming the first file that differs from the manifest or was changed
        since this object was made, and ``OSError``."""
        for file, expected in self._hashes.items():
            with file.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if found != expected:
                raise ValueError(f"{file} was changed: its SHA-256 is not the one in the model's manifest")
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Compare the files' states. Raises ``ValueError``, naming the first file that was changed since this object
        was made, and ``OSError``."""
        for file, before in self._states.items():
            if _state(file) != before:
                raise ValueError(f"{file} was changed while the model was loaded")


def _state(file: Path) -> State:
    """Return what every change of the file changes too. Only the operating system sets ``st_ctime_ns``."""
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
