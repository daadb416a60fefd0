"""The media of a chat: images, for models that read them. They are read, and decoded in the order of the messages."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from ...interface.dialect_settings import DialectSettings
from ...interface.errors import InvalidField, RequestError
from ...interface.request import MediaPart, Message
from .check import check_places
from .images import MAX_ALL_PIXELS, UNBOUNDED, DecodedImage, ImageRoom, decoded
from .source import Sources

MAX_IMAGES = 100  # of one request


def images_of(
    messages: Sequence[Message],
    settings: DialectSettings,
    *,
    reads_images: bool,
    deadline: float | None,
    room: ImageRoom = UNBOUNDED,
) -> tuple[DecodedImage, ...]:
    """Return the decoded images of the messages, in their order; () if there are none.

    ``deadline`` is in seconds of ``time.monotonic()``; what is fetched must come before. ``room`` is where they are
    kept; raises what it raises. Raises ``InvalidField`` for
    media that the model does not read, that may not be read, cannot be read or are too large; ``RequestError`` if this
    server has no decoders, ``Overloaded`` if no process can decode now. Blocks the thread or the greenlet.
    """
    media = _media_of(messages)
    if not media:
        return ()
    check_parts(media, settings, reads_images)
    _check_roles(messages)
    sources, found, left = Sources(settings, deadline), [], MAX_ALL_PIXELS
    for part in media:
        image = decoded(sources.read(part), part, left, room)
        left -= image.width * image.height
        found.append(image)
    return tuple(found)


def _media_of(messages: Sequence[Message]) -> list[MediaPart]:
    found = [part for message in messages if not isinstance(message.content, str) for part in message.content]
    return [part for part in found if isinstance(part, MediaPart)]


def _check_roles(messages: Sequence[Message]) -> None:
    for message in messages:
        if message.role != "user":
            for part in _media_of((message,)):
                allowed = '"text": only messages of the user have images'
                raise InvalidField(f"{part.part}.type", part.name, allowed)


def check_parts(media: Sequence[MediaPart], settings: DialectSettings, reads_images: bool) -> None:
    """Raise the errors that need nothing to be read."""
    check_places(media, settings)
    if not reads_images:
        raise InvalidField(f"{media[0].part}.type", media[0].name, '"text": this model reads text only')
    only = '"text" or "image_url": this model reads text and images'
    for part in media:
        if part.kind != "image":
            raise InvalidField(f"{part.part}.type", part.name, only)
    if len(media) > MAX_IMAGES:
        raise InvalidField(media[MAX_IMAGES].field, f"{len(media)} images", f"at most {MAX_IMAGES} in a request")
    if importlib.util.find_spec("PIL") is None:
        field = media[0].field
        needed = "reading images needs the package pillow: pip install 'mlflow-llm[images]'"
        raise RequestError(f"{field}: {needed}", param=field)
