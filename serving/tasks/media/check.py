"""Checks of media in messages: which of them may be read.

A path or URL is looked at only if the endpoint's settings allow it: a server that reads whatever a caller names
exposes its files and its network to everyone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...interface.dialect_settings import DialectSettings
from ...interface.errors import InvalidField
from ...interface.request import MediaPart

PATHS, DOMAINS = "allowedLocalMediaPath", "allowedMediaDomains"


def check_places(media: Sequence[MediaPart], settings: DialectSettings) -> None:
    """Raise ``InvalidField`` for a path or URL that may not be read, and for a file that is not there or too large."""
    for part in media:
        if part.source == "path":
            _check_file(part, settings.allowedLocalMediaPath)
        elif part.source == "url":
            check_host(part, part.place, settings.allowedMediaDomains or ())


def check_size(part: MediaPart, size: int) -> None:
    """Raise ``InvalidField`` for an empty file and one that is too large."""
    if not 0 < size <= part.max_bytes:
        raise InvalidField(part.field, f"{size} bytes", f"1 to {part.max_bytes} bytes")


def locate(part: MediaPart, allowed: str | None) -> tuple[str, str]:
    """Return the directory below which files may be read and the file below it, without symbolic links in either.

    Raises ``InvalidField`` for a file outside; the error does not tell whether it exists.
    """
    if allowed is None:
        raise InvalidField(part.field, part.place, f"no local path: {PATHS} allows none")
    try:
        root, real = os.path.realpath(allowed), os.path.realpath(part.place)
        if os.path.commonpath((root, real)) == root:
            return root, real
    except ValueError:  # it is no path: it has a null character, or half of a surrogate pair
        pass
    raise InvalidField(part.field, part.place, f"a path below {allowed} ({PATHS})")


def check_host(part: MediaPart, address: str, allowed: Sequence[str]) -> None:
    """Raise ``InvalidField`` unless ``address``, a host with or without its port, is one of those that are allowed."""
    host = address.rpartition(":")[0] if address.rpartition(":")[2].isdigit() else address
    names = {name.lower() for name in allowed}
    if not names & {host.lower(), address.lower()}:
        listed = ", ".join(allowed) if allowed else "none are allowed"
        raise InvalidField(part.field, address, f"a URL with one of the hosts in {DOMAINS}: {listed}")


def _check_file(part: MediaPart, allowed: str | None) -> None:
    _, real = locate(part, allowed)
    if not os.path.isfile(real):
        raise InvalidField(part.field, part.place, "a file that is there")
    check_size(part, os.path.getsize(real))
