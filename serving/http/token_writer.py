"""What a stream's tokens say, written by the greenlet that receives them.

A stream's own greenlet waits for its next piece most of the time. To switch to it for every token, and through all that
it went through to get there, would cost more than to read the token, encode its text and send it. So while it waits,
tokens do not wake it; everything else does: the first token and the last, errors, a client that takes no more.
"""

from __future__ import annotations

from typing import Any, Protocol

import gevent

from ..dialects import StreamEncoder, TemplatedEncoder
from ..engine.interface import TappableStream
from ..events import Event, Tokens
from ..observability.access_record import AccessRecord
from ..tasks.generate import Pieces, Run


class WriteFailed(OSError):
    """A part of the answer could not be written, with the arguments of the error that says so."""


class WriteTimedOut(WriteFailed, TimeoutError):
    """The client took nothing for the socket's timeout."""


class Socket(Protocol):
    """See ``gunicorn.write_backpressure.BackpressureSocket``."""

    def append(self, data: bytes) -> None: ...
    def send_pending(self) -> bool: ...
    def flush(self) -> None: ...


class _Turn:
    """Writers of which something is to be sent, which is done once the greenlet that receives tokens waits for more: a
    stream that is behind gets what has come for it in one packet."""

    def __init__(self) -> None:
        self._writers: list[TokenWriter] = []

    def add(self, writer: TokenWriter) -> None:
        if not self._writers:
            gevent.get_hub().loop.run_callback(self._send)
        self._writers.append(writer)

    def _send(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.send()


_turn = _Turn()


class TokenWriter:
    """Of one stream; from ``begin`` on it takes part. ``run``, ``encoder`` and ``record`` are the stream's own."""

    __slots__ = ("_encoder", "_error", "_is_due", "_record", "_run", "_sock", "_stream", "_templated")

    def __init__(
        self, run: Run, stream: TappableStream, encoder: StreamEncoder, record: AccessRecord, sock: Socket
    ) -> None:
        self._run, self._stream, self._encoder, self._record, self._sock = run, stream, encoder, record, sock
        is_traced = record.replies is not None
        self._templated = encoder if isinstance(encoder, TemplatedEncoder) and not is_traced else None
        self._error: Exception | None = None
        self._is_due = False  # what was said is to be sent in this turn

    def begin(self) -> None:
        self._stream.tap(self._take)

    def _take(self, event: Event) -> bool:
        """Say what ``event`` says. Where that fails, the stream's own greenlet is told."""
        if type(event) is not Tokens:
            return False
        try:
            if not self._write_text(event):
                for piece in self._run.feed(event):
                    self._record.see(piece)
                    self._write(self._encoder.encode(piece))
        except Exception as error:
            self._error = error
            self._stream.have_reader(self._fail)
        return True

    def _write_text(self, event: Tokens) -> bool:
        """The way of nearly all: False, and nothing is done, where there is more to ``event`` than text."""
        template = None if self._templated is None else self._templated.template
        if template is None or (text := self._run.read(event)) is None:
            return False
        self._record.count(event.index, len(event.token_ids))
        if text:
            self._write(template.fill(text))
        return True

    def _write(self, data: bytes) -> None:
        if not data:
            return
        self._sock.append(data)
        if not self._is_due:
            self._is_due = True
            _turn.add(self)

    def send(self) -> None:
        """Where the client takes no more, the stream's own greenlet waits for it."""
        self._is_due = False
        if not self._sock.send_pending():
            self._stream.have_reader(self._flush)

    def _fail(self) -> None:
        assert self._error is not None
        raise self._error

    def _flush(self) -> None:
        try:
            self._sock.flush()
        except OSError as error:
            raise (WriteTimedOut if isinstance(error, TimeoutError) else WriteFailed)(*error.args) from error


def token_writer(source: Pieces, encoder: StreamEncoder, record: AccessRecord, sock: Any) -> TokenWriter | None:
    """None where tokens have to go the long way: over TLS, of an engine in this process, of what is no text."""
    run, stream = source.run, source.stream
    if not isinstance(run, Run) or not isinstance(stream, TappableStream) or not getattr(sock, "sends_now", False):
        return None
    return TokenWriter(run, stream, encoder, record, sock)
