"""The event stream of an in-flight request, as its reader sees it, with a bounded buffer (back-pressure)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from ...interface.events import Event, Failed, Logits, is_terminal
from ...interface.request import ValidRequest
from .protocol_state import ClientState

HIGH_EVENTS = 1024  # high watermark: with this many waiting events per sequence, the request is paused
LOW_EVENTS = 128  # low watermark: with this many events left per sequence, the request is resumed
HIGH_BYTES = 32 * 2**20  # of logits
LOW_BYTES = 4 * 2**20
MAX_MARKS = 8  # the watermarks of a request with n sequences are min(n, MAX_MARKS) times those of one sequence


class _Errand(NamedTuple):
    """A call that the reader has to make before it takes the next event."""

    run: Callable[[], object]


class EventBuffer:
    """The queue between the io loop, which puts a request's events, and the single reader. Either may be a thread.

    The loop pauses the request when the buffer ``is_full``; the reader resumes it when the buffer ``is_drained``. Both
    check again after they have announced this, so they cannot wait for each other.

    A reader on a greenlet of the loop's thread may ``tap`` the buffer: a greenlet switch for every token costs more
    than what the reader does with a token.
    """

    __slots__ = ("_high", "_is_awaited", "_low", "_take", "events", "get", "paused", "put")

    def __init__(self, events: Any, num_sequences: int) -> None:
        marks = min(num_sequences, MAX_MARKS)
        self.events, self._high, self._low = events, HIGH_EVENTS * marks, LOW_EVENTS * marks
        self.paused = False
        self.put: Callable[[Event], bool | None] = events.put
        self.get: Callable[[], Event] = events.get
        self._take: Callable[[Event], bool] = _take_nothing
        self._is_awaited = False  # True while the reader waits and the queue is empty

    @property
    def is_full(self) -> bool:
        return bool(self.events.qsize() >= self._high)

    @property
    def is_drained(self) -> bool:
        """Whether the request was paused because of this buffer and there is room again."""
        return self.paused and self.events.qsize() <= self._low

    def tap(self, take: Callable[[Event], bool]) -> bool:
        """See ``RemoteStream.tap``."""
        if not getattr(self.events, "is_local", False):
            return False
        self._take, self.put, self.get = take, self._put_tapped, self._get_tapped
        return True

    def untap(self) -> None:
        """Offer events to nobody any more. ``take`` usually leads back to the stream, so a buffer that kept it would be
        freed by a garbage collection only."""
        if self._take is not _take_nothing:
            self._take, self.put, self.get = _take_nothing, self.events.put, self.events.get

    def have_reader(self, run: Callable[[], object]) -> None:
        """Have the reader of a tapped buffer ``run`` something before it takes the next event."""
        self._is_awaited = False
        self.events.put(_Errand(run))

    def _put_tapped(self, event: Event) -> bool:
        if self._is_awaited and self._take(event):
            return True
        self._is_awaited = False  # the next event may come before the switch to the reader
        self.events.put(event)
        return False

    def _get_tapped(self) -> Event:
        while True:
            self._is_awaited = not self.events.qsize()
            try:
                event: Event | _Errand = self.events.get()
            finally:
                self._is_awaited = False
            if not isinstance(event, _Errand):
                return event
            event.run()


def _take_nothing(event: Event) -> bool:
    return False


class LogitsBuffer(EventBuffer):
    """A buffer that is also full when too many bytes of logits wait in it.

    Only the loop changes ``_came``, and only the reader changes ``_went``.
    """

    __slots__ = ("_came", "_went")

    def __init__(self, events: Any, num_sequences: int) -> None:
        super().__init__(events, num_sequences)
        self._came = self._went = 0
        self.put, self.get = self._put, self._get

    def _put(self, event: Event) -> None:
        self._came += _size(event)
        self.events.put(event)

    def _get(self) -> Event:
        event: Event = self.events.get()
        self._went += _size(event)
        return event

    def tap(self, take: Callable[[Event], bool]) -> bool:
        """Refuse the tap: every event has to go through the queue to be counted."""
        return False

    @property
    def is_full(self) -> bool:
        return super().is_full or self._came - self._went >= HIGH_BYTES

    @property
    def is_drained(self) -> bool:
        return super().is_drained and self._came - self._went <= LOW_BYTES


def _size(event: Event) -> int:
    return len(event.data) if isinstance(event, Logits) else 0


def event_buffer(request: ValidRequest, events: Any) -> EventBuffer:
    """Return a buffer for the events of ``request`` on top of the queue ``events``."""
    sampling = request.sampling
    asks = sampling is not None and (sampling.context_logits or sampling.generation_logits)
    return (LogitsBuffer if asks else EventBuffer)(events, len(request.sequences))


class CommandQueue(Protocol):
    """The part of ``IoLoop`` that a stream uses."""

    stopping: bool

    def post(self, command: Callable[[ClientState], None]) -> None: ...


class RequestHandle:
    """The io loop that runs a request, and the request's number there (set by the command that submits it).

    A request that is handed over gets another loop and number.
    """

    __slots__ = ("io", "number")

    def __init__(self, io: CommandQueue) -> None:
        self.io, self.number = io, 0

    def post(self, command: Callable[[ClientState, int], None]) -> None:
        """Have ``command`` run by the loop that owns the request at that time."""
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
    """The events of one request. Iterate it from one thread. If it is dropped or closed early, it aborts the request.

    ``owner`` is the stream's client; the reference keeps it from being collected before the stream."""

    def __init__(self, handle: RequestHandle, buffer: EventBuffer, num_sequences: int, owner: object = None) -> None:
        self.handle, self.buffer, self._left, self.owner = handle, buffer, num_sequences, owner
        self._pid = os.getpid()
        self._closed = False

    @property
    def is_over(self) -> bool:
        return self._left <= 0 or self._closed

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self.is_over:
            raise StopIteration
        if self._pid != os.getpid():
            self._left = 0
            return Failed("aborted", "this stream belongs to the process that was forked")
        event = self.buffer.get()
        if self.buffer.is_drained:
            self.buffer.paused = False
            self.handle.post(lambda state, number: state.resume(number))
        if is_terminal(event):
            self._left = 0 if isinstance(event, Failed) else self._left - 1
        return event

    def tap(self, take: Callable[[Event], bool]) -> bool:
        """Offer from now on events that arrive while the reader waits in ``next`` to ``take``, on the io loop's
        greenlet.

        The reader does not get the events for which ``take`` returns True. ``take`` must neither block nor raise.
        Return False, and offer nothing, if the reader and the loop are on different threads or the request asks for
        logits.
        """
        return self.buffer.tap(take)

    def have_reader(self, run: Callable[[], object]) -> None:
        """Have the waiting reader of a tapped stream call ``run``, which may raise, and then continue to wait."""
        self.buffer.have_reader(run)

    def finish(self, index: int) -> None:
        """End only sequence ``index``; it still gets its ``Finished``."""
        if self._left > 0 and self._pid == os.getpid():
            self.handle.post(lambda state, number: state.finish(number, index))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.buffer.untap()
        if self._left > 0 and self._pid == os.getpid():
            self._left = 0
            self.handle.abort()

    def __enter__(self) -> RemoteStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
