"""The loop that owns a client's connection and drives its ``ClientState``, on a thread or a greenlet.

Only the loop's owner uses the connection and the state. Others post commands, which wake the loop through a pipe.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TypedDict, Unpack

import msgspec
import zmq

from ...interface.errors import ServingError, ShuttingDown, Unavailable
from .. import protocol as m
from ..wake_pipe import WakePipe
from .connection import Connection
from .connection_state import Happening, State, after
from .finder import Finder
from .poller import Poller
from .protocol_state import ClientState, died
from .reconnect import NOT_FOUND, Reconnect

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0  # seconds, in the error of requests that found no engine
CHECK_SECONDS = 0.25  # seconds between checks of the engine's lock and the clock
PING_SECONDS = 5.0
DEAD_TURNS = 4
FRAMES_PER_TURN = 16  # frames read before others may run: an engine faster than its readers must not starve them
Command = Callable[[ClientState], None]


class WaitOptions(TypedDict, total=False):
    """The time for which the client waits for an engine.

    Both timeouts count the seconds in which there is no engine, not even one that loads. ``timeout`` limits the wait
    for the first welcome; after ``away_timeout``, requests that wait for the next engine fail. None, the default, means
    no limit. ``cancelled`` ends the wait for the first welcome. For ``on_search_failure`` see ``Reconnect``.
    """

    timeout: float | None
    away_timeout: float | None
    cancelled: Callable[[], bool]
    on_search_failure: Callable[[str], object]


class IoLoop:
    """A client's io loop. ``poller`` is how the owner waits; ``keep`` finds the engine again even if no request runs.

    ``stall_timeout`` is how many seconds without progress the client accepts before it leaves the engine. ``rest`` lets
    other greenlets run between two turns.

    ``phase`` is the state of the connection (``connection_state``). Any thread may set ``stopping``, which ends the
    loop. ``step_age`` is the seconds since the engine's last known step; it grows while the engine is silent.
    """

    def __init__(
        self,
        poller: Poller,
        finder: Finder,
        state: ClientState,
        *,
        stall_timeout: float,
        keep: bool,
        rest: Callable[[], None],
        **options: Unpack[WaitOptions],
    ) -> None:
        self.timeout, self.away_timeout = options.get("timeout"), options.get("away_timeout")
        self._cancelled = options.get("cancelled", lambda: False)
        self.poller, self.finder, self.state, self.keep, self.rest = poller, finder, state, keep, rest
        self.stall_timeout = stall_timeout
        self.phase: State = "disconnected"
        self.stopping = False
        self.step_age = 0.0
        self._commands: deque[Command] = deque()
        self._pipe = WakePipe()
        poller.watch([self._pipe.fd])
        self._context = zmq.Context()
        self.connection: Connection | None = None  # while connecting and connected
        self._reconnect = Reconnect(options.get("on_search_failure", lambda message: None))
        self._without_progress = 0.0  # seconds, as counted by this loop's own turns
        self._turned_at = self._pinged_at = self._looked_at = 0.0
        self._dead_turns = 0

    @property
    def stalled(self) -> bool:
        """Whether the client left the engine because it made no progress, and has found no other yet."""
        return self.phase == "stalled"

    # any thread

    def post(self, command: Command) -> None:
        """Have the loop run ``command`` on the state."""
        self._commands.append(command)
        self._pipe.wake()

    def stop(self) -> None:
        self.stopping = True
        self._pipe.wake()

    # the loop's owner

    def open(self) -> None:
        """Find an engine, connect, and wait for its welcome. Raises ``Unavailable`` and what ``Finder.find`` raises."""
        while not (self.stopping or self._cancelled()):
            if self.connection is None:
                self.connect()
            self._turn()
            if self.phase == "connected":
                return
            if refusal := self._refusal():
                raise Unavailable(refusal, retry_after=1.0)
            if self.timeout is not None and self._reconnect.away > self.timeout:
                raise Unavailable(f"no engine answered within {self.timeout:g} seconds", retry_after=1.0)
        raise ShuttingDown("the client was closed")

    def run(self) -> None:
        """Run the loop until ``stop``; requests that still run then fail with ``shutting_down``."""
        error: ServingError = ShuttingDown("the client was closed")
        try:
            while not self.stopping:
                if self.connection is None and (self.state.busy or self.keep):
                    self.search()
                self._turn()
                if self.phase != "connected":
                    self._check_absence()
        except BaseException as broken:
            logger.exception("the engine's client ends")
            error = died(f"the client failed: {type(broken).__name__}")
            raise
        finally:
            self.stopping = True
            self._fail_all(error)
            self.close()

    def close(self) -> None:
        """Say goodbye and free all resources. Idempotent."""
        self.stopping = True
        if self.connection is not None:
            self.state.outbox.append(m.encode(m.Goodbye()))
            self._flush()
        self._leave("closed", linger=100)
        self._context.term()
        self.finder.close()
        self.poller.watch([])
        self._pipe.close()

    def forget(self) -> None:
        """Release the parent's pipe in a forked child; ZeroMQ's objects know their process and do nothing there."""
        self._pipe.close()

    def search(self) -> None:
        try:
            self.connect()
            self._reconnect.found()
        except NOT_FOUND as error:
            if final := self._reconnect.failed(error):
                self._fail_all(final)

    def _fail_all(self, error: ServingError) -> None:
        """Fail all requests and calls. Commands run first: a request handed over to another engine must not fail."""
        self._run_commands()
        self.state.fail_all(error)

    def connect(self) -> None:
        self._reconnect.endpoint = self.finder.find(self.finder.generation if self.stalled else "", self._is_over)
        self.phase = after(self.phase, "found")
        try:
            self.connection = Connection(self._context, self._reconnect.endpoint, self.finder.secret)
        except BaseException:
            self.phase = after(self.phase, "lost")
            raise
        self.poller.watch([self._pipe.fd, *self.connection.fds])
        self._without_progress = 0.0
        self.state.hello(self.finder.client_id)

    def _is_over(self) -> bool:
        """Return whether the loop is stopping, after running the commands.

        A search calls this repeatedly; it may take minutes, and requests may be handed over during that time.
        """
        self._run_commands()
        return self.stopping

    def _leave(self, happening: Happening, linger: int = 0) -> None:
        self.phase = after(self.phase, happening)
        if self.connection is not None:
            self.poller.watch([self._pipe.fd])
            self.connection.close(linger)
            self.connection = None

    def _lost(self, happening: Happening = "lost") -> None:
        self._leave(happening)
        self.state.disconnected()
        self._without_progress = 0.0

    def _turn(self) -> None:
        self._count_time()
        self._run_commands()
        more = self._receive()
        if self._flush() or more or self._was_welcomed():
            self.rest()
        elif self._wait() or self.is_dead():
            self._receive()  # the messages that the engine sent before it died
            if self.connection is not None:
                self._lost()
            return
        self._watch()

    def _count_time(self) -> None:
        """Count the time since the last call, but never more than two turns.

        So the engine is not blamed for the time in which this process is stopped or the machine sleeps.
        """
        now = time.monotonic()
        passed = min(now - self._turned_at, 2 * CHECK_SECONDS)
        self._turned_at = now
        self._without_progress += passed
        self.step_age += passed
        if self.phase != "connected" and self._counts_as_away():
            self._reconnect.away += passed

    def _counts_as_away(self) -> bool:
        if self.connection is None or not self.connection.connected:
            return True
        # an engine on this host is only found once it is ready: if it does not answer a reconnection, it hangs
        return self.finder.secret is None and self.state.info is not None

    def _check_absence(self) -> None:
        """Log that there is no engine and, after ``away_timeout``, fail the requests that wait for it."""
        refusal = self._refusal()
        self._reconnect.log_absence(refusal)
        if self.away_timeout is not None and self._reconnect.away > self.away_timeout:
            self._reconnect.away = 0.0
            self._fail_all(Unavailable(refusal or "the engine is not running", retry_after=RETRY_SECONDS))

    def _refusal(self) -> str:
        has_handshake = self.connection is not None and self.connection.connected
        return self._reconnect.refusal(self.state.refused, has_handshake=has_handshake)

    def _was_welcomed(self) -> bool:
        """Return whether a welcome was read that ``_watch`` has not seen.

        Then the loop must not wait first, since no other message may follow.
        """
        return self.phase == "connecting" and self.state.welcome

    def is_dead(self) -> bool:
        """Return whether the engine no longer lives.

        Usually the broken connection shows this first, after the last message; this check is for a connection that does
        not break.
        """
        if self._turned_at - self._looked_at < CHECK_SECONDS:
            return False
        self._looked_at = self._turned_at
        if self.state.progressed:  # the engine was alive since the last check
            self._dead_turns = 0
            return False
        self._dead_turns = 0 if self.connection is None or self.finder.alive() else self._dead_turns + 1
        return self._dead_turns > DEAD_TURNS

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()(self.state)

    def _flush(self) -> bool:
        """Send the outbox; return whether anything was sent."""
        return self.connection is not None and self.connection.send(self.state.outbox)

    def _wait(self) -> bool:
        """Wait for something to do; return whether the connection has broken."""
        searching = self.connection is None and (self.keep or self.state.busy)
        ready = self.poller.poll(self._reconnect.pause if searching else CHECK_SECONDS, self._take)
        if self._pipe.fd in ready:
            self._pipe.drain()
        if self.connection is None or not self.connection.is_broken(ready):
            return False
        self._reconnect.broken(had_begun=self.connection.connected)
        return True

    def _take(self, fd: int) -> bool:
        """Read frames as ``Poller.poll`` describes; return True if their events only had to be delivered."""
        if self.connection is None or fd != self.connection.fds[0] or self._read():
            return False
        state = self.state
        return self.phase == "connected" and not (state.outbox or state.closing is not None or state.lost)

    def _receive(self) -> bool:
        """Read the frames that have arrived; return whether there may be more to do."""
        return self._read() or self._is_left()

    def _read(self) -> bool:
        """Read the frames that have arrived; return whether there may be more."""
        for _ in range(FRAMES_PER_TURN):
            frame = None if self.connection is None else self.connection.receive()
            if frame is None:
                return False
            try:
                self.state.receive(frame)
            except msgspec.DecodeError as error:
                logger.warning("an unreadable message: %s", error)
        return True

    def _is_left(self) -> bool:
        """Leave an engine that is closing or does not know us; return whether it was left.

        The engine itself has failed the requests that it had taken; the others are for the next engine.
        """
        if self.connection is None or (self.state.closing is None and not self.state.lost):
            return False
        self._lost()
        return True

    def _watch(self) -> None:
        """Check that the engine makes progress, and send keepalives to an engine on another host."""
        if self.state.progressed:
            self.state.progressed, self._without_progress = False, 0.0
            if self.phase == "connecting" and self.state.welcome:
                self.phase = after(self.phase, "welcomed")
                self._reconnect.is_back()
        if self.state.step_age is not None:
            self.step_age, self.state.step_age = self.state.step_age, None
        if self.connection is None or not (self.state.busy or self.keep or self.phase == "connecting"):
            return
        if self._without_progress > self.stall_timeout:
            logger.warning("the engine makes no progress")
            self._lost("hung")
        elif self.finder.secret is not None and self._turned_at - self._pinged_at > PING_SECONDS:
            self._pinged_at = self._turned_at
            self.state.outbox.append(m.encode(m.Ping()))
