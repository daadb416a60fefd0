"""Write the text of a stream's tokens from the greenlet that receives them.

A stream's own greenlet waits for its next piece most of the time. Switching to it for every token, through all the
calls in which it waits, would cost more than reading the token, encoding its text and sending it. So tokens do not wake
it while it waits; everything else does: the first and the last token, errors, and a client that reads no more.
"""

from __future__ import annotations

from typing import Any, Protocol

import gevent

from ...dialects import StreamEncoder, has_template
from ...interface.engine import TappableStream, is_tappable
from ...interface.events import Event, Tokens
from ...observability.access_record import AccessRecord
from ...tasks.reply.generate import Pieces, Run


class WriteFailed(OSError):
    """A part of the response could not be written. It has the arguments of the original error."""


class WriteTimedOut(WriteFailed, TimeoutError):
    """The client read nothing for the socket's timeout."""


class Socket(Protocol):
    """The protocol of ``gunicorn.write_backpressure.BackpressureSocket``."""

    def append(self, data: bytes) -> None: ...
    def send_pending(self) -> bool: ...
    def flush(self) -> None: ...


class _Turn:
    """A collector of writers that have something to send, which sends once the greenlet that receives tokens waits for
    more.

    So if several tokens have arrived for a stream, it gets them in one packet.
    """

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
    """The writer of the tokens of one stream, from ``begin`` on. ``run``, ``encoder`` and ``record`` are the stream's
    own."""

    __slots__ = ("_encoder", "_error", "_is_due", "_record", "_run", "_sock", "_stream", "_templated")

    def __init__(
        self, run: Run, stream: TappableStream, encoder: StreamEncoder, record: AccessRecord, sock: Socket
    ) -> None:
        self._run, self._stream, self._encoder, self._record, self._sock = run, stream, encoder, record, sock
        is_traced = record.replies is not None
        self._templated = encoder if has_template(encoder) and not is_traced else None
        self._error: Exception | None = None
        self._is_due = False  # whether appended data will be sent in this turn

    def begin(self) -> None:
        self._stream.tap(self._take)

    def _take(self, event: Event) -> bool:
        """Write ``event`` if it is ``Tokens``, and return whether it was. Errors go to the stream's own greenlet."""
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
        """Write ``event`` by the fast path of nearly all events. Return False, without doing anything, if it is more
        than plain text."""
        template = None if self._templated is None else self._templated.template
        if template is None or (text := self._run.read(event)) is None:
            return False
        self._record.count(event.index, len(event.token_ids))
        if text:
            if self._record.output is not None:
                self._record.output.add_text(event.index, text)
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
        """Send what was appended; if the client accepts no more, let the stream's own greenlet wait for it."""
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
    """Make a stream's token writer, or None if its own greenlet must write: over TLS, with an engine in this process,
    or for output that is not text."""
    run, stream = source.run, source.stream
    if not isinstance(run, Run) or not is_tappable(stream) or not getattr(sock, "sends_now", False):
        return None
    return TokenWriter(run, stream, encoder, record, sock)
