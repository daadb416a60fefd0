"""Lines of a batch's input, cut into chunks and checked."""

from __future__ import annotations

import json

import pytest

from mlflow_llm.serving.batches.lines import CHUNK_BYTES, MAX_ERRORS, Refused, chunks_of, lines_of

URL = "/v1/completions"


def line(custom_id: str, **body: object) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body}).encode() + b"\n"


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\n\n  \n"])
def test_chunks_are_whole_lines_and_give_the_file_again(end: bytes) -> None:
    """Chunks joined are the file; each ends at a line's end; a longer line is a chunk; each line is found in its."""
    lines = [
        line(str(i), prompt="x" * size) for i, size in enumerate([5, CHUNK_BYTES, 10, CHUNK_BYTES * 2, 1, 100_000])
    ]
    content = b"".join(lines).rstrip() + end
    chunks = list(chunks_of(content))
    assert b"".join(chunks) == content
    assert all(chunk.endswith(b"\n") for chunk in chunks[:-1])
    found = lines_of(chunks, URL, 10)
    assert [one.custom_id for one in found] == [str(i) for i in range(6)]
    for one, text in zip(found, lines, strict=True):
        assert json.loads(chunks[one.chunk][one.start : one.start + one.size]) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        (b"[1]\n", "invalid_json_line", "line"),
        (b"\xff\n", "invalid_json_line", "line"),
        (b'{"a":' * 5000 + b"\n", "invalid_json_line", "line"),
        (line("a", prompt="x").replace(b"POST", b"GET"), "invalid_request", "method"),
        (line("a", prompt="x").replace(b"completions", b"chat"), "invalid_request", "url"),
        (line("", prompt="x"), "invalid_request", "custom_id"),
        (line("a" * 513, prompt="x"), "invalid_request", "custom_id"),
        (line("a", stream=True), "invalid_request", "body.stream"),
        (
            b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": [], "x": 1}\n',
            "invalid_request",
            "x",
        ),
    ],
)
def test_a_wrong_line_is_named(text: bytes, code: str, param: str) -> None:
    """A line that is no request of the batch is refused with its number and what is wrong."""
    with pytest.raises(Refused) as caught:
        lines_of([line("before", prompt="x") + b"\n" + text], URL, 10)
    (error,) = caught.value.errors
    assert (error["line"], error["code"] in (code, "mismatched_endpoint"), error["param"]) == (3, True, param)


def test_errors_are_bounded() -> None:
    """The first hundred lines are named of a file that is wrong in every line."""
    with pytest.raises(Refused) as caught:
        lines_of([b"x\n" * 500], URL, 10)
    assert len(caught.value.errors) == MAX_ERRORS
