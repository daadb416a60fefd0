"""How a client on another host names an adapter to an engine: by the hash of its content, and where it was loaded from.

A host that has joined a database fetches contents from there. Its engine asks for a missing one by a file in a
directory that both know, named by the hash; the host removes the file when the content is in its cache, and writes into
it why that fails. On any other host the adapter has to be in the same directory, below one that is allowed, with the
same content.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..model_files.adapter_contents import local_path

FORM = re.compile(r"sha256:([0-9a-f]{64}):(.+)", re.DOTALL)


def place_elsewhere(content_hash: str, path: str) -> str:
    """Return the name of a content that was loaded from the directory ``path``."""
    return f"sha256:{content_hash}:{path}"


def parse_place(given: str) -> tuple[str, str]:
    """Return content hash, "" if there is none, and directory of an adapter."""
    found = FORM.fullmatch(given)
    return (found[1], found[2]) if found else ("", given)


class ContentRequests:
    """The directory of requests for contents, on a host that fetches them."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def find(self, content_hash: str) -> tuple[str, str]:
        """Return where the cache of this host has a content, or "" and why it could not be fetched yet.

        A missing content is requested.
        """
        if path := local_path(content_hash):
            return path, ""
        request = self.directory / content_hash
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not request.exists():
            request.touch(mode=0o600)
        return "", request.read_text(encoding="utf-8", errors="replace")[:1000]

    def open(self) -> list[str]:
        """Return the hashes of the contents that were requested."""
        try:
            return [path.name for path in self.directory.iterdir() if re.fullmatch("[0-9a-f]{64}", path.name)]
        except FileNotFoundError:
            return []

    def done(self, content_hash: str) -> None:
        """Remove a request: the content is there, or nobody needs it any more."""
        (self.directory / content_hash).unlink(missing_ok=True)

    def failed(self, content_hash: str, message: str) -> None:
        """Say why a content could not be fetched."""
        (self.directory / content_hash).write_text(message, encoding="utf-8")
