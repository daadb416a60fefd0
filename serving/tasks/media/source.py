"""Reads the bytes of media: from the request itself, from a file, from a URL. What may be read is checked again here,
by what has been opened: files and links may change between a check and its use."""

from __future__ import annotations

import base64
import binascii
import os
import stat
import time
from urllib.parse import SplitResult, urlsplit

from ...interface.dialect_settings import DialectSettings
from ...interface.errors import InvalidField
from ...interface.request import MediaPart
from .check import check_host, check_size, locate
from .fetch import NotFetched, TooLarge, fetch

FETCH_SECONDS = 10.0  # for one URL, from the look-up of its host's name to the last byte
ALL_FETCHES_SECONDS = 30.0  # seconds for all URLs of a request together
CHUNK_BYTES = 1 << 20


class Sources:
    """The reader of the media of one request. ``deadline`` is in seconds of ``time.monotonic()``, None for none."""

    def __init__(self, settings: DialectSettings, deadline: float | None) -> None:
        self._settings = settings
        self._deadline = deadline
        self.left = ALL_FETCHES_SECONDS

    def read(self, part: MediaPart) -> bytes:
        """Return the bytes of ``part``.

        Raises ``InvalidField``, naming its field, if they may not be read, cannot be read or are too many.
        """
        if part.source == "data":
            return _decoded(part)
        if part.source == "path":
            return _read_file(part, self._settings.allowedLocalMediaPath)
        return self._fetched(part)

    def _fetched(self, part: MediaPart) -> bytes:
        began = time.monotonic()
        until = began + min(FETCH_SECONDS, self.left)
        if self._deadline is not None:
            until = min(until, self._deadline)
        try:
            return fetch(_url(part, self._settings.allowedMediaDomains or ()), part.max_bytes, until)
        except TooLarge:
            raise InvalidField(
                part.field, f"more than {part.max_bytes} bytes", f"1 to {part.max_bytes} bytes"
            ) from None
        except NotFetched as error:
            raise InvalidField(part.field, part.place, f"a URL that can be fetched: {error}") from None
        finally:
            self.left -= time.monotonic() - began


def _decoded(part: MediaPart) -> bytes:
    try:
        data = base64.b64decode(part.content, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidField(part.field, f"{len(part.content)} characters that are not base64", "valid base64") from None
    check_size(part, len(data))
    return data


def _url(part: MediaPart, allowed: tuple[str, ...]) -> SplitResult:
    """Return the URL of ``part``, whose own host is checked: ``place`` is what the dialect took for it."""
    try:
        url = urlsplit(part.content)
        host, port = url.hostname or "", url.port
    except ValueError:
        host, port = "", None
    if not host or url.scheme not in ("http", "https") or "@" in url.netloc:
        raise InvalidField(part.field, part.place, "an http or https URL with a host, without a user's name")
    check_host(part, host if port is None else f"{host}:{port}", allowed)
    return url


def _read_file(part: MediaPart, allowed: str | None) -> bytes:
    root, real = locate(part, allowed)
    try:
        descriptor = _open(root, os.path.relpath(real, root).split(os.sep))
    except OSError:
        raise InvalidField(part.field, part.place, "a file that is there and may be read") from None
    with open(descriptor, "rb", buffering=0) as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidField(part.field, part.place, "a regular file")
        check_size(part, found.st_size)
        data = bytearray()
        while len(data) <= part.max_bytes and (chunk := file.read(min(CHUNK_BYTES, part.max_bytes + 1 - len(data)))):
            data += chunk
    check_size(part, len(data))  # it may have become longer
    return bytes(data)


def _open(root: str, names: list[str]) -> int:
    """Open a file below the directory ``root`` for reading, one name after the other.

    No symbolic link is followed, so whatever is swapped meanwhile, the file is below ``root``. A FIFO does not block.
    Raises ``OSError``.
    """
    step = os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
    parent = os.open(root, step)
    try:
        for name in names[:-1]:
            child = os.open(name, step, dir_fd=parent)
            os.close(parent)
            parent = child
        if not stat.S_ISREG(os.stat(names[-1], dir_fd=parent, follow_symlinks=False).st_mode):
            raise OSError  # opening a device may already do something
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return os.open(names[-1], flags, dir_fd=parent)
    finally:
        os.close(parent)
