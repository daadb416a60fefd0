"""Checks of media in messages: which of them may be read. No model here can read any of them.

A path or URL is looked at only if the endpoint's settings allow it: a server that reads whatever a caller names
exposes its files and its network to everyone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..dialect_settings import DialectSettings
from ..errors import InvalidField
from ..request import MediaPart, Message

PATHS, DOMAINS = "allowedLocalMediaPath", "allowedMediaDomains"


def check_media(messages: Sequence[Message], settings: DialectSettings) -> None:
    """Raise ``InvalidField`` if a message contains media, because the model reads only text.

    If one of them may not be read or is too large, the error says that instead.
    """
    found = [part for message in messages if not isinstance(message.content, str) for part in message.content]
    media = [part for part in found if isinstance(part, MediaPart)]
    for part in media:
        if part.source == "path":
            _check_file(part, settings.allowedLocalMediaPath)
        elif part.source == "url":
            _check_host(part, settings.allowedMediaDomains or ())
    if media:
        raise InvalidField(f"{media[0].part}.type", f"{media[0].kind}_url", '"text": this model reads text only')


def _check_file(part: MediaPart, allowed: str | None) -> None:
    if allowed is None:
        raise InvalidField(part.field, part.place, f"no local path: {PATHS} allows none")
    root, real = os.path.realpath(allowed), os.path.realpath(part.place)
    if os.path.commonpath((root, real)) != root:  # checked first, so that the error does not tell whether it exists
        raise InvalidField(part.field, part.place, f"a path below {allowed} ({PATHS})")
    if not os.path.isfile(real):
        raise InvalidField(part.field, part.place, "a file that is there")
    if not 0 < (size := os.path.getsize(real)) <= part.most:
        raise InvalidField(part.field, f"{size} bytes", f"1 to {part.most} bytes")


def _check_host(part: MediaPart, allowed: tuple[str, ...]) -> None:
    host = part.place.rpartition(":")[0] if part.place.rpartition(":")[2].isdigit() else part.place
    names = {name.lower() for name in allowed}
    if not names & {host.lower(), part.place.lower()}:
        listed = ", ".join(allowed) if allowed else "none are allowed"
        raise InvalidField(part.field, part.place, f"a URL with one of the hosts in {DOMAINS}: {listed}")
