"""Tokens that are written by the greenlet that receives them, while their stream's own waits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from typing import Any

import gevent
import pytest

from mlflow_llm.serving.dialects import DIALECTS
from mlflow_llm.serving.frontend.streams.in_flight import ClientGone, InterruptibleIterator
from mlflow_llm.serving.frontend.streams.stream import Stream
from mlflow_llm.serving.frontend.streams.token_writer import token_writer
from mlflow_llm.serving.http.gunicorn.write_backpressure import BackpressureSocket
from mlflow_llm.serving.interface.events import Event, Finished, Tokens
from mlflow_llm.serving.interface.reply import Piece
from mlflow_llm.serving.interface.request import Sampling, Sequence, ValidRequest
from mlflow_llm.serving.observability.access_record import AccessRecord
from mlflow_llm.serving.tasks.prompt.text import TextModel
from mlflow_llm.serving.tasks.reply import generate
from mlflow_llm.serving.transport.client.event_stream import RemoteStream, RequestHandle, event_buffer
from mlflow_llm.serving.transport.client.gevent_client import LocalQueue

TEXT = "Hello w\u00f6rld \u00e9\U0001f600 and on"


class Wire:
    """A client's connection that records what arrived and limits how many bytes it accepts at once."""

    def __init__(self, *, chunked: bool = True) -> None:
        self.data, self.room, self.waited, self.num_sent = b"", 10**6, 0, 0
        self.error: OSError | None = None
        self.sock = BackpressureSocket(None, self._send, self._send_now, chunked=chunked)

    def _send(self, data: Any) -> int:
        self.waited += 1
        if self.error is not None:
            raise self.error
        self.data += bytes(data)
        return len(data)

    def _send_now(self, data: bytes) -> int:
        self.num_sent += 1
        taken = data[: self.room]
        self.room -= len(taken)
        self.data += taken
        return len(taken)


def stream_of(
    text: TextModel,
    wire: Wire,
    *,
    direct: bool,
    task: str = "chat",
    dialect: str = "openai",
    chunked: bool = True,
    record: AccessRecord | None = None,
    pulled: Callable[[generate.Pieces], InterruptibleIterator[Piece]] = InterruptibleIterator,
) -> tuple[Callable[[Event], None], gevent.Greenlet, list[int]]:
    """Return how the engine's client puts events, the greenlet that answers as gunicorn does, and what it pulled."""
    request = ValidRequest(
        request_id="r1",
        task=task,  # type: ignore[arg-type]
        model="m",
        sequences=(Sequence(prompt_token_ids=(1, 2)),),
        sampling=Sampling(max_tokens=500),
        stream=True,
        created=1,
    )
    buffer = event_buffer(request, LocalQueue())

    class Client:
        stopping = True

        def post(self, command: object) -> None: ...

        def submit(self, request: ValidRequest) -> RemoteStream:
            return RemoteStream(RequestHandle(self), buffer, 1)

    source = generate.run(Client(), request, text)  # type: ignore[arg-type]
    record = record or AccessRecord(request_id="r1", method="POST", path="/")
    encoder = DIALECTS[dialect].stream(request, b"")
    writer = token_writer(source, encoder, record, wire.sock) if direct else None
    assert (writer is not None) == direct
    pull, held = pulled(source), ExitStack()
    held.callback(pull.close)
    stream = Stream(encoder, pull, record, held, writer)
    lengths: list[int] = []

    def answer() -> None:
        with closing(stream), suppress(ClientGone):
            for data in stream:
                lengths.append(len(data))
                wire.sock.sendall(b"%X\r\n%b\r\n" % (len(data), data) if chunked else data)

    return lambda event: buffer.put(event), gevent.spawn(answer), lengths


def tokens(text: TextModel) -> list[Tokens]:
    ids = text.encode(TEXT, False)
    return [Tokens(0, (token_id,), num_cached_tokens=None if i else 0) for i, token_id in enumerate(ids)]


def said_the_long_way(text: TextModel, **options: Any) -> bytes:
    wire = Wire()
    put, greenlet, _ = stream_of(text, wire, direct=False, **options)
    for event in (*tokens(text), Finished(0, "stop")):
        put(event)
    greenlet.get(timeout=30)
    return wire.data


@pytest.mark.parametrize(
    ("task", "dialect"), [("chat", "openai"), ("completions", "openai"), ("chat", "anthropic"), ("chat", "databricks")]
)
def test_tokens_do_not_wake_their_stream(instant_text: TextModel, task: str, dialect: str) -> None:
    """All but the first token go out as they come, in the same bytes, and the stream is not switched to for them."""
    wire = Wire()
    put, greenlet, pulled = stream_of(instant_text, wire, direct=True, task=task, dialect=dialect)
    first, *others = tokens(instant_text)
    put(first)
    gevent.idle()
    before = len(pulled)
    for event in others:
        put(event)
    gevent.idle()
    sent = wire.data
    assert len(pulled) == before
    put(Finished(0, "stop"))
    greenlet.get(timeout=30)
    assert wire.data.startswith(sent)
    assert wire.data == said_the_long_way(instant_text, task=task, dialect=dialect)


@pytest.mark.parametrize(
    ("task", "dialect"), [("chat", "openai"), ("completions", "databricks"), ("chat", "anthropic")]
)
def test_text_alone_goes_straight_into_its_template(
    instant_text: TextModel, monkeypatch: pytest.MonkeyPatch, task: str, dialect: str
) -> None:
    """Once there is a template a token that is only text is written into it, with the same usage and bytes."""
    wire = Wire()
    put, greenlet, _ = stream_of(instant_text, wire, direct=True, task=task, dialect=dialect)
    first, second, *others = tokens(instant_text)
    put(first)
    gevent.idle()
    put(second)
    with monkeypatch.context() as patch:
        patch.setattr(generate.Run, "feed", lambda run, event: 1 / 0)
        for event in others:
            put(event)
    put(Finished(0, "stop"))
    greenlet.get(timeout=30)
    assert wire.data == said_the_long_way(instant_text, task=task, dialect=dialect)


def test_content_that_is_traced_is_gathered(instant_text: TextModel) -> None:
    """Traced content includes the tokens that were written without waking the stream's greenlet."""
    wire, record = Wire(), AccessRecord(request_id="r1", method="POST", path="/", replies={})
    put, greenlet, _ = stream_of(instant_text, wire, direct=True, record=record)
    for event in tokens(instant_text):
        put(event)
        gevent.idle()
    put(Finished(0, "stop"))
    greenlet.get(timeout=30)
    assert record.replies is not None
    assert record.replies[0].choice(0).text == TEXT[1:]


def test_what_has_come_for_a_stream_goes_out_together(instant_text: TextModel) -> None:
    """Tokens of several steps that are available together are sent in one packet."""
    wire = Wire()
    put, greenlet, _ = stream_of(instant_text, wire, direct=True)
    first, *others = tokens(instant_text)
    put(first)
    gevent.idle()
    for event in others:
        put(event)
    gevent.idle()
    assert wire.num_sent == 1
    put(Finished(0, "stop"))
    greenlet.get(timeout=30)


@pytest.mark.parametrize("room", [0, 1, 40, 250])
def test_a_client_that_takes_no_more_is_waited_for_by_its_stream(instant_text: TextModel, room: int) -> None:
    """Output that the socket does not accept is sent by the stream's greenlet, before all later output."""
    wire = Wire()
    put, greenlet, _ = stream_of(instant_text, wire, direct=True)
    first, *others = tokens(instant_text)
    put(first)
    gevent.idle()
    wire.room, wire.waited = room, 0
    for i, event in enumerate(others):
        put(event)
        if i % 5 == 4:
            gevent.idle()
    put(Finished(0, "stop"))
    greenlet.get(timeout=30)
    assert wire.waited
    assert wire.data == said_the_long_way(instant_text)


@pytest.mark.parametrize("error", [TimeoutError("timed out"), BrokenPipeError(32, "Broken pipe")])
def test_a_connection_that_breaks_ends_the_answer(instant_text: TextModel, error: OSError) -> None:
    """A broken connection raises its error out of the stream, as any write would, for gunicorn to handle."""
    wire = Wire()
    put, greenlet, _ = stream_of(instant_text, wire, direct=True)
    first, second, *_ = tokens(instant_text)
    put(first)
    gevent.idle()
    wire.room, wire.error = 0, error
    put(second)
    with pytest.raises(type(error) if isinstance(error, TimeoutError) else OSError) as caught:
        greenlet.get(timeout=30)
    assert caught.value.args == error.args


def test_what_goes_wrong_with_a_token_is_said_in_the_stream(
    instant_text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in writing a token ends the stream with an error event and does not reach whoever put the token."""
    wire = Wire()
    put, greenlet, _ = stream_of(instant_text, wire, direct=True)
    first, second, *_ = tokens(instant_text)
    put(first)
    gevent.idle()
    monkeypatch.setattr(generate.Run, "feed", lambda run, event: 1 / 0)
    put(second)
    greenlet.get(timeout=30)
    assert b"internal error" in wire.data
    assert wire.data.endswith(b"data: [DONE]\n\n\r\n")


def test_an_answer_without_chunks(instant_text: TextModel) -> None:
    """A client of HTTP/1.0 gets the reply without chunked encoding."""
    wire = Wire(chunked=False)
    put, greenlet, _ = stream_of(instant_text, wire, direct=True, chunked=False)
    events = tokens(instant_text)
    put(events[0])
    gevent.idle()
    for event in (*events[1:], Finished(0, "stop")):
        put(event)
    greenlet.get(timeout=30)
    lines = wire.data.split(b"\n\n")
    assert all(line.startswith(b"data: ") for line in lines[:-1])
    assert lines[-2:] == [b"data: [DONE]", b""]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_stream_that_is_over_needs_no_garbage_collection(instant_text: TextModel, is_interrupted: bool) -> None:
    """A finished stream leaves no reference cycle, so that its request is freed without a garbage collection."""
    streams: weakref.WeakSet[RemoteStream] = weakref.WeakSet()
    pulls: list[InterruptibleIterator[Piece]] = []

    def pulled(source: generate.Pieces) -> InterruptibleIterator[Piece]:
        streams.add(source.stream)  # type: ignore[arg-type]
        pulls.append(InterruptibleIterator(source))
        return pulls[0]

    gc.disable()
    try:
        put, greenlet, _ = stream_of(instant_text, Wire(), direct=True, pulled=pulled)
        for event in tokens(instant_text):
            put(event)
            gevent.idle()
        assert len(streams) == 1
        if is_interrupted:
            pulls[0].interrupt(ClientGone())
        else:
            put(Finished(0, "stop"))
        greenlet.get(timeout=30)
        del put, greenlet
        pulls.clear()
        assert not streams
    finally:
        gc.enable()
