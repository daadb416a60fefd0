"""Bodies of uploads, as httpx writes them and as nobody should."""

from __future__ import annotations

import httpx
import pytest

from mlflow_llm.serving.http.batches.multipart import read_upload
from mlflow_llm.serving.interface.errors import RequestError


def body_of(**parts: object) -> tuple[bytes, str]:
    request = httpx.Request("POST", "http://x", **parts)
    return request.read(), request.headers["content-type"]


def test_an_upload_has_its_fields_and_its_file() -> None:
    """Fields are texts, and the content of the file is what was sent, line ends and boundaries included."""
    content = bytes(range(256)) * 40 + b"\r\n--x\r\n"
    body, kind = body_of(data={"purpose": "batch", "note": "é"}, files={"file": ("a.jsonl", content)})
    found = read_upload(body, kind, "file")
    assert (found.fields, found.filename) == ({"purpose": "batch", "note": "é"}, "a.jsonl")
    assert found.content == content


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda body, kind: (body, "multipart/form-data"), "Content-Type"),
        (lambda body, kind: (body[: len(body) // 2], kind), "file|body"),
        (lambda body, kind: (b"", kind), "file|body"),
        (lambda body, kind: (body.replace(b'name="file"', b'name="other"'), kind), "other"),
        (lambda body, kind: (body.replace(b'name="purpose"', b'name="file"'), kind), "file"),
        (lambda body, kind: (body.replace(b"batch", b"x" * 2000), kind), "purpose"),
        (lambda body, kind: (body.replace(b"batch", b"\xff\xfe"), kind), "body"),
        (lambda body, kind: (body.replace(b"Content-Disposition", b"Content-Nothing"), kind), "body"),
    ],
)
def test_a_wrong_body_is_refused(change: object, named: str) -> None:
    """A body without a boundary, cut off, or with the wrong parts is refused by name."""
    body, kind = body_of(data={"purpose": "batch"}, files={"file": ("a.jsonl", b"{}\n")})
    with pytest.raises(RequestError, match=named):
        read_upload(*change(body, kind), "file")
