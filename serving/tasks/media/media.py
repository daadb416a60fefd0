"""The media of a chat: pictures, for models that read them. They are read, and decoded in the order of the messages."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from ...interface.dialect_settings import DialectSettings
from ...interface.errors import InvalidField, RequestError
from ...interface.request import MediaPart, Message
from .check import check_places
from .images import MAX_ALL_PIXELS, DecodedPicture, decoded
from .source import Sources

MAX_PICTURES = 100  # of one request


def pictures_of(
    messages: Sequence[Message], settings: DialectSettings, *, reads_pictures: bool, deadline: float | None
) -> tuple[DecodedPicture, ...]:
    """Return the decoded pictures of the messages, in their order; () if there are none.

    ``deadline`` is in seconds of ``time.monotonic()``; what is fetched must come before. Raises ``InvalidField`` for
    media that the model does not read, that may not be read, cannot be read or are too large; ``RequestError`` if this
    server has no decoders, ``Overloaded`` if no process can decode now. Blocks the thread or the greenlet.
    """
    media = _media_of(messages)
    if not media:
        return ()
    _check(media, settings, reads_pictures)
    _check_roles(messages)
    sources, found, left = Sources(settings, deadline), [], MAX_ALL_PIXELS
    for part in media:
        picture = decoded(sources.read(part), part, left)
        left -= picture.width * picture.height
        found.append(picture)
    return tuple(found)


def _media_of(messages: Sequence[Message]) -> list[MediaPart]:
    found = [part for message in messages if not isinstance(message.content, str) for part in message.content]
    return [part for part in found if isinstance(part, MediaPart)]


def _check_roles(messages: Sequence[Message]) -> None:
    for message in messages:
        if message.role != "user":
            for part in _media_of((message,)):
                allowed = '"text": only messages of the user have pictures'
                raise InvalidField(f"{part.part}.type", part.name, allowed)


def _check(media: Sequence[MediaPart], settings: DialectSettings, reads_pictures: bool) -> None:
    """Raise the errors that need nothing to be read."""
    check_places(media, settings)
    if not reads_pictures:
        raise InvalidField(f"{media[0].part}.type", media[0].name, '"text": this model reads text only')
    only = '"text" or "image_url": this model reads text and pictures'
    for part in media:
        if part.kind != "image":
            raise InvalidField(f"{part.part}.type", part.name, only)
    if len(media) > MAX_PICTURES:
        raise InvalidField(media[MAX_PICTURES].field, f"{len(media)} pictures", f"at most {MAX_PICTURES} in a request")
    if importlib.util.find_spec("PIL") is None:
        field = media[0].field
        needed = "reading pictures needs the package pillow: pip install 'mlflow-llm[pictures]'"
        raise RequestError(f"{field}: {needed}", param=field)
