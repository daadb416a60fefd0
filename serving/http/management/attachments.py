"""Replies that are files: written to a temporary file first, so that an error still gets its own status."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import IO

from ...frontend.answer import Answer

PARQUET = "application/vnd.apache.parquet"
CHUNK_BYTES = 1 << 16


def attached(name: str, content_type: str, write: Callable[[IO[bytes]], object]) -> Answer:
    """Return a reply with what ``write`` writes, to be saved as ``name``."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - open until it is sent
    try:
        write(file)
    except BaseException:
        file.close()
        raise
    file.seek(0)
    return Answer(body=_read(file), content_type=content_type, headers=attachment(name))


def _read(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def attachment(name: str) -> dict[str, str]:
    """Return the header by which a browser saves the reply as ``name``."""
    return {"Content-Disposition": f'attachment; filename="{name}"'}
