"""What a caller holds of a running request: its events, in a buffer that does not grow without bound."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ...events import Event, Failed, is_terminal
from .protocol_state import ClientState

HIGH = 1024  # events a sequence that may wait for their reader before the engine is told to pause
LOW = 128  # events left at which the engine is asked to go on
MAX_MARKS = 8  # a request of many sequences may keep this many times the marks, not more


class EventBuffer:
    """Between the loop that receives a request's events and the one reader they are for. Either may be a thread.

    The loop pauses the request when the buffer ``is_full``; the reader asks for more once it ``is_drained``. Both look
    again after they have said so, hence neither can wait for the other.
    """

    def __init__(self, events: Any, num_sequences: int) -> None:
        marks = min(num_sequences, MAX_MARKS)
        self._events, self._high, self._low = events, HIGH * marks, LOW * marks
        self.paused = False
        self.put: Callable[[Event], None] = events.put
        self.get: Callable[[], Event] = events.get

    @property
    def is_full(self) -> bool:
        return bool(self._events.qsize() >= self._high)

    @property
    def is_drained(self) -> bool:
        """Whether the request was paused for this buffer's sake and there is room again."""
        return self.paused and self._events.qsize() <= self._low


class CommandQueue(Protocol):
    """The side of ``io_loop.IoLoop`` that a stream speaks to."""

    stopping: bool

    def post(self, command: Callable[[ClientState], None]) -> None: ...


class RequestHandle:
    """Where a request runs, and under which number, once the command that submits it has run; it may move to another
    engine."""

    __slots__ = ("io", "number")

    def __init__(self, io: CommandQueue) -> None:
        self.io, self.number = io, 0

    def post(self, command: Callable[[ClientState, int], None]) -> None:
        """Have the loop that owns the request by then run ``command``."""
        io = self.io

        def run(state: ClientState) -> None:
            if self.io is io:
                command(state, self.number)
            else:
                self.post(command)

        if not io.stopping:
            io.post(run)

    def abort(self) -> None:
        self.post(lambda state, number: state.abort(number))


class RemoteStream:
    """The events of one request; iterate it from one thread. Dropped or closed early, it aborts the request.

    ``owner`` is the client that it runs through, which lives as long as somebody reads."""

    def __init__(self, handle: RequestHandle, buffer: EventBuffer, num_sequences: int, owner: object = None) -> None:
        self.handle, self._buffer, self._left, self.owner = handle, buffer, num_sequences, owner
        self._pid = os.getpid()
        self._closed = False

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._left <= 0 or self._closed:
            raise StopIteration
        if self._pid != os.getpid():
            self._left = 0
            return Failed("aborted", "this stream belongs to the process that was forked")
        event = self._buffer.get()
        if self._buffer.is_drained:
            self._buffer.paused = False
            self.handle.post(lambda state, number: state.resume(number))
        if is_terminal(event):
            self._left = 0 if isinstance(event, Failed) else self._left - 1
        return event

    def finish(self, index: int) -> None:
        """End sequence ``index`` alone; it still gets its ``Finished``."""
        if self._left > 0 and self._pid == os.getpid():
            self.handle.post(lambda state, number: state.finish(number, index))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._left > 0 and self._pid == os.getpid():
            self._left = 0
            self.handle.abort()

    def __enter__(self) -> RemoteStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
