"""The stream of a reply: an iterator over its bytes, which WSGI servers and gRPC read and close."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from ...dialects import StreamEncoder
from ...interface.errors import Aborted, InternalError, ServingError
from ...interface.reply import Piece
from ...observability.access_record import AccessRecord
from ...system import logs
from .first_bytes import FirstBytes, Patience
from .in_flight import ClientGone
from .token_writer import TokenWriter, WriteFailed


class Stream:
    """The bytes of a streamed reply. ``close``, which WSGI servers always call, releases everything.

    Nothing is buffered here: a slow reader stops the pulling, and its request leaves the engine while more than some
    thousand tokens wait for it (``event_stream``). A reader that takes nothing for ``io_timeout`` loses its connection.

    With ``patience``, the stream begins even if the reply does not (``StreamEncoder.waiting``), and shows signs of life
    until it does. While this iterator waits for a later piece, ``tokens`` writes arriving tokens. It starts after the
    first bytes of the reply were taken, when the response's head has been sent.
    """

    def __init__(
        self,
        encoder: StreamEncoder,
        pieces: Iterator[Piece],
        record: AccessRecord,
        held: ExitStack,
        tokens: TokenWriter | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._encoder = encoder
        self._pieces = pieces
        self.record = record
        self._held = held
        self._tokens = tokens
        self.patience = patience
        self._first: bytes | None = None
        self._awaited: FirstBytes | None = None
        self._complete = False
        self._over = False

    def prime(self) -> None:
        """Wait for the first bytes, within patience for those of the reply. Raises the same errors as ``invoke``."""
        if self.patience is not None:
            self._awaited = FirstBytes(self._next_bytes, self.patience)
        self._first = self._next_or_waiting()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self._over:
            raise StopIteration
        if self._tokens is not None and self._awaited is None:
            self._tokens.begin()
            self._tokens = None
        try:
            data = self._next_or_waiting()
        except ServingError as error:
            return self._fail(error)
        except (ClientGone, WriteFailed):
            raise
        except Exception:
            logs.event("fault", level=40, exc_info=True, request_id=self.record.request_id)
            return self._fail(InternalError("internal error; the log has it under the request id"))
        if not data:
            self._over = True
            self.close()
            raise StopIteration
        return data

    def _next_or_waiting(self) -> bytes:
        """Return the next non-empty chunk, or b"" at the end; a sign of life if the reply's first one takes long."""
        while self._awaited is not None:
            if self._awaited.are_ready():
                awaited, self._awaited = self._awaited, None
                return awaited.get()
            if data := self._encoder.waiting():
                return data
        return self._next_bytes()

    def _next_bytes(self) -> bytes:
        """Return the next non-empty chunk of the reply, or b"" at the end."""
        for piece in self._pieces:
            data = self._encoder.encode(piece)
            if data:
                return data
        self._complete = True
        return b""

    def _fail(self, error: ServingError) -> bytes:
        self._over = True
        self.release(error)
        self.record.finish(error.status, error.logged)
        return self._encoder.error(error)

    def release(self, error: BaseException | None = None) -> None:
        """Abort what still runs and settle, with ``error`` if there was one. Later calls do nothing."""
        if self._awaited is not None:
            self._awaited.abandon()
            self._awaited = None
        self._held.__exit__(type(error) if error else None, error, None)

    def close(self) -> None:
        if self._complete:
            self.release()
            self.record.finish(200)
        else:
            self.release(ClientGone())
            self.record.finish(Aborted.status, "the client went away")
