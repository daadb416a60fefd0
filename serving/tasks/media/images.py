"""Decodes images in a confined process: their bytes come from anyone, and decoders are written in C.

The pixels are exactly those of transformers' ``load_image``: the same library decodes them, with the same calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...interface.errors import InvalidField, Overloaded
from ...interface.request import MediaPart
from ...model_files.image_layout import MAX_RATIO, is_too_thin
from ...sandbox import IMAGES, Ended, Exceeded, Limits, NoProcess, Refused, decode_limits

MAX_PIXELS = 2**25  # of one image
MAX_ALL_PIXELS = 2**26  # of all images of one request
_DAMAGED = f"an image in PNG, JPEG, WebP or GIF with at most {MAX_PIXELS} pixels that can be decoded"
_TOO_MANY = f"at most {MAX_ALL_PIXELS} pixels in all images of a request together"
# how files begin, to name what a caller sent by mistake
_BEGINNINGS = (
    (0, b"\xff\xd8\xff", "a JPEG file"),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG file"),
    (0, b"GIF8", "a GIF file"),
    (8, b"WEBP", "a WebP file"),
    (0, b"BM", "a BMP file"),
    (0, b"II*\0", "a TIFF file"),
    (0, b"MM\0*", "a TIFF file"),
    (0, b"%PDF", "a PDF file"),
    (4, b"ftyp", "a HEIC, AVIF or video file"),
    (0, b"<svg", "an SVG file"),
    (0, b"<?xml", "an XML file"),
    (0, b"<!", "an HTML file"),
    (0, b"<html", "an HTML file"),
)


class DecodedImage(NamedTuple):
    """An image: ``data`` is RGB, a byte a channel, [height, width, 3] from the top left; ``part`` is where it stands
    in the request."""

    width: int
    height: int
    data: bytes
    part: MediaPart


def keep_any(size: int) -> None:
    """Make room for ``size`` bytes of pixels where nothing bounds them."""


class ImageRoom(NamedTuple):
    """Whose images are decoded, and where they are kept: ``keep`` makes room for so many bytes of pixels, or raises
    the error with which the request is refused. ``caller`` has one image decoded at a time; "" is no caller."""

    caller: str = ""
    keep: Callable[[int], None] = keep_any


UNBOUNDED = ImageRoom()


def decoded(data: bytes, part: MediaPart, left: int = MAX_ALL_PIXELS, room: ImageRoom = UNBOUNDED) -> DecodedImage:
    """Return a decoded image; ``left`` is how many pixels the request may still have.

    ``room`` is asked before the pixels are made, by the size in the file's header. Raises what it raises,
    ``InvalidField``, and ``Overloaded`` if no process can decode now.
    """
    maximum = min(MAX_PIXELS, left)
    limits = decode_limits(maximum, len(data))
    if room.keep is not keep_any:
        room.keep(3 * int(_run("image_size", data, part, left, limits, room)))
    size, pixels = _run("image", data, part, left, limits, room)
    width, height = size
    if not 0 < width * height <= maximum or len(pixels) != 3 * width * height:
        raise _damaged(part, data, "it is damaged")
    if is_too_thin((width, height)):
        allowed = f"an image whose longer side is at most {MAX_RATIO} times the shorter one"
        raise InvalidField(part.field, f"{width} x {height} pixels", allowed)
    return DecodedImage(width, height, pixels, part)


def _run(work: str, data: bytes, part: MediaPart, left: int, limits: Limits, room: ImageRoom) -> Any:
    try:
        return IMAGES.run(work, limits, data=data, caller=room.caller, maximum=min(MAX_PIXELS, left))
    except Refused as error:
        if error.kind == "TooManyPixels" and left < MAX_PIXELS:
            raise InvalidField(part.field, _kind(data), f"{_TOO_MANY}: {_reason(error)}") from None
        raise _damaged(part, data, _reason(error)) from None
    except Exceeded:
        raise _damaged(part, data, "decoding it takes too much time or memory") from None
    except (Ended, NoProcess) as error:
        raise Overloaded(f"images cannot be decoded now: {error}", retry_after=1.0) from None


def _damaged(part: MediaPart, data: bytes, reason: str) -> InvalidField:
    return InvalidField(part.field, _kind(data), f"{_DAMAGED}: {reason}")


def _reason(error: Refused) -> str:
    """Return the reason in our own words: a decoder's may quote the file, which the caller perhaps cannot read."""
    if error.kind == "TooManyPixels":
        return f"it has {error.message} pixels"
    if error.kind == "UnidentifiedImageError":
        return "it is none of these or is damaged"
    return "it ends too early" if "truncated" in error.message.lower() or error.kind == "EOFError" else "it is damaged"


def _kind(data: bytes) -> str:
    for at, beginning, name in _BEGINNINGS:
        if data[at : at + len(beginning)] == beginning:
            return name
    return f"a file of {len(data)} bytes"
