"""Read the body of an upload (``multipart/form-data``, RFC 7578): one file and some short fields."""

from __future__ import annotations

from msgspec import Struct
from werkzeug.exceptions import HTTPException
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData

from ...interface.errors import InvalidField, RequestError

MAX_FIELD_BYTES = 1024
MAX_PARTS = 16


class Upload(Struct, frozen=True, kw_only=True):
    """The parts of an upload: its fields as texts, the file's own name and its content."""

    fields: dict[str, str]
    filename: str
    content: bytes


def read_upload(body: bytes, content_type: str, name: str) -> Upload:
    """Return the upload in ``body``, whose file is the part ``name``. Raises ``InvalidField``, ``RequestError``."""
    boundary = parse_options_header(content_type)[1].get("boundary", "")
    if not boundary or not boundary.isascii():
        raise InvalidField("Content-Type", content_type[:80], "multipart/form-data with a boundary")
    fields: dict[str, str] = {}
    files: dict[str, tuple[str, bytes]] = {}
    try:
        for part, data in _parts(body, boundary.encode()):
            if part.name in fields or part.name in files:
                raise InvalidField(part.name[:80], "two parts", "one part of that name")
            if isinstance(part, File):
                files[part.name] = (part.filename, data)
            elif len(data) > MAX_FIELD_BYTES:
                raise InvalidField(part.name[:80], f"{len(data)} bytes", f"a text of at most {MAX_FIELD_BYTES} bytes")
            else:
                fields[part.name] = data.decode()
    except (ValueError, HTTPException) as error:
        raise RequestError(f"body: not a multipart/form-data body ({type(error).__name__})", param="body") from None
    for other in files.keys() - {name}:
        raise InvalidField(other[:80], "a file", f"a text; the file is {name}")
    if name not in files:
        raise InvalidField(name, fields.get(name), "a file: a part with a filename")
    filename, content = files[name]
    return Upload(fields=fields, filename=filename, content=content)


def _parts(body: bytes, boundary: bytes) -> list[tuple[Field | File, bytes]]:
    decoder = MultipartDecoder(boundary, max_parts=MAX_PARTS)
    decoder.receive_data(body)
    decoder.receive_data(None)
    found: list[tuple[Field | File, list[bytes]]] = []
    while not isinstance(event := decoder.next_event(), Epilogue | NeedData):
        if isinstance(event, Field | File):
            found.append((event, []))
        elif isinstance(event, Data):
            found[-1][1].append(event.data)
    return [(part, b"".join(pieces)) for part, pieces in found]
