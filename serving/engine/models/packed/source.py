"""The files that packed weights are made from, and whether they are what the model's manifest says.

A model is identified by the hashes in its manifest, but a load usually compares only the files' sizes. Weights from a
damaged file must not be kept under the name of the intact model: whoever loads that one would be given them.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ....interface.bundle import Bundle

State = tuple[int, ...]


class PackedSource:
    """The files in ``model_dir``, to be made before any of them is read."""

    def __init__(self, bundle: Bundle) -> None:
        """Raises ``OSError`` if a file is missing."""
        folder = Path(bundle.model_dir)
        self._hashes = {folder / path: expected for path, expected in bundle.model_hashes.items()}
        self._states = {file: _state(file) for file in self._hashes}

    def check(self) -> None:
        """Hash the files. Raises ``ValueError``, which names the first that differs from the manifest or was changed
        since this object was made, and ``OSError``."""
        for file, expected in self._hashes.items():
            with file.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if found != expected:
                raise ValueError(f"{file} was changed: its SHA-256 is not the one in the model's manifest")
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raises ``ValueError``, which names the first file that was changed since this object was made, and
        ``OSError``."""
        for file, before in self._states.items():
            if _state(file) != before:
                raise ValueError(f"{file} was changed while the model was loaded")


def _state(file: Path) -> State:
    """What a change of the file changes too. Only the system sets ``st_ctime_ns``."""
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
