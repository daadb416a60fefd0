"""Server-sent events of every dialect, as clients read them that split lines with ``str.splitlines``."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from mlflow_llm.serving.dialects import DIALECTS, sse
from mlflow_llm.serving.interface.errors import InternalError
from mlflow_llm.serving.interface.reply import CallDelta, Delta, Done, Ended, Piece, TextLogprob, Usage
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest

LINE_ENDS = "".join(c for c in map(chr, range(sys.maxunicode + 1)) if len(f"a{c}b".splitlines()) == 2)
TEXT = "".join(f"<{c}>é" for c in LINE_ENDS)
LOGPROB = TextLogprob(token=TEXT, bytes=(), token_id=1, logprob=-1.0)
STREAMING = [name for name in DIALECTS if name != "kserve"]  # which streams over gRPC only
DONE = (Ended(index=0, finish_reason="stop"), Done(usage=Usage(prompt_tokens=2, completion_tokens=2)))
REPLIES: dict[str, tuple[Piece, ...]] = {
    "text": (Delta(index=0, text=TEXT, num_tokens=1), Delta(index=0, text=TEXT, num_tokens=1)),
    "logprobs": (Delta(index=0, text=TEXT, num_tokens=1, logprobs=(LOGPROB,)),),
    "reasoning": (Delta(index=0, text="", reasoning=TEXT, num_tokens=1),),
    "call": (
        Delta(index=0, text="", calls=(CallDelta(index=0, id="call_1", name="look"),)),
        Delta(index=0, text="", calls=(CallDelta(index=0, arguments=json.dumps(TEXT, ensure_ascii=False)),)),
    ),
}


def _encoder(name: str) -> Any:
    request = ValidRequest(
        request_id="r1",
        task="chat",
        model="m" + TEXT,
        sequences=(Sequence(prompt_token_ids=(1, 2)),),
        sampling=Sampling(max_tokens=9, logprobs=0),
        created=1700000000,
    )
    return DIALECTS[name].stream(request, _echoed(name))


def _echoed(name: str) -> bytes:
    if name == "generate":
        from mlflow_llm.serving.dialects.triton.requests import read_generate

        return read_generate({"text_input": "a"}, version=None, stream=True).echoed
    if name == "triton-generate":
        from mlflow_llm.serving.dialects.base import Head

        head = Head(DIALECTS["generate"].routes[-1], {})
        return DIALECTS[name].decode(head, b'{"text_input": "a", "max_tokens": 4, "temperature": 1.0}').echoed
    return b""


def _data(sent: bytes) -> list[Any]:
    """Return the data of the events, as a client reads it that knows lines by ``str.splitlines``."""
    lines = sent.decode().splitlines()
    assert all(line.partition(":")[0] in ("data", "event", "") for line in lines)
    return [json.loads(line[5:]) for line in lines if line.startswith("data:") and line != "data: [DONE]"]


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("name", STREAMING)
def test_no_event_has_a_line_end_in_its_data(name: str, reply: str) -> None:
    """Whatever ends a line for some client is escaped, wherever in an event it stands, and is the same text again."""
    encoder = _encoder(name)
    sent = b"".join(map(encoder.encode, (*REPLIES[reply], *DONE)))
    assert any(TEXT in text for text in _texts(_data(sent)))


@pytest.mark.parametrize("name", STREAMING)
def test_no_error_event_has_one(name: str) -> None:
    """The message of an error in a stream is one line too."""
    found = _data(_encoder(name).error(InternalError(TEXT)))
    assert TEXT in _texts(found)


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for entry in value.values() for text in _texts(entry)]
    if isinstance(value, list):
        return [text for entry in value for text in _texts(entry)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("character", LINE_ENDS)
def test_a_line_of_json(character: str) -> None:
    """One line, the same value, in keys as well."""
    value = {f"é{character}": [character, f"{character}{character}"]}
    data = sse.json_line(value)
    assert len(data.decode().splitlines()) == 1
    assert json.loads(data) == value
