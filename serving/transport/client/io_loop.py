"""A client's connection and the loop that drives its ``ClientState``; the same code on a thread and on a greenlet.

The loop's owner is the only one that touches the socket and the state. Others put commands into a queue and write a
byte into a pipe.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from ...errors import ServingError, ShuttingDown, Unavailable
from .. import protocol as m
from .connection import Connection
from .finder import Finder
from .poller import Poller
from .protocol_state import ClientState, died
from .reconnect import NOT_FOUND, Search

logger = logging.getLogger(__name__)

RETRY_AFTER = 5.0  # seconds, for those who were told that there is no engine
TURN = 0.25  # seconds between looks at the engine's lock and the clock
PING_INTERVAL = 5.0
DEAD_TURNS = 4
REFUSALS = 3  # connections in a row that end before they begin: no accident
QUIET_SECONDS = 5.0  # without an engine, before the log says so
FRAMES_PER_TURN = 64  # taken before others may run: an engine faster than its readers must not starve them
Command = Callable[[ClientState], None]


class IoLoop:
    """``poller`` is how its owner waits. ``keep`` finds the engine again even when nothing of ours runs on it.

    ``rest`` lets others run between two turns, where that does not come by itself (greenlets). Both timeouts are
    seconds without an engine, even one that loads: ``timeout`` before the first welcome, ``away_timeout`` after which
    what waits for the next one fails. None is as long as it takes. ``cancelled`` ends the wait for the first welcome.
    ``troubled``: see ``search.Search``.
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
        timeout: float | None = None,
        away_timeout: float | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        troubled: Callable[[str], object] = lambda message: None,
    ) -> None:
        self.timeout, self.away_timeout, self._cancelled = timeout, away_timeout, cancelled
        self.poller, self.finder, self.state, self.keep, self.rest = poller, finder, state, keep, rest
        self.stall_timeout = stall_timeout
        self._search = Search(troubled)
        self.stopping = False
        self.stalled = False
        self._commands: deque[Command] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        poller.watch([self._wake_read])
        self._context = zmq.Context()
        self._connection: Connection | None = None
        self._still = 0.0  # seconds without progress, as counted by this loop's own turns
        self.step_age = 0.0  # seconds since the engine's last step that is known of; grows while the engine is silent
        self._turned_at = self._pinged_at = self._looked_at = 0.0
        self._dead_turns = self._refusals = 0
        self._endpoint = ""
        self._away = 0.0  # seconds without an engine, as ``_still``
        self._told = ""

    # any thread

    def post(self, command: Command) -> None:
        """Have the loop run ``command`` on the state."""
        self._commands.append(command)
        with contextlib.suppress(BlockingIOError, OSError):  # a full pipe wakes as well
            os.write(self._wake_write, b"x")

    def stop(self) -> None:
        self.stopping = True
        self.post(lambda state: None)

    # the loop's owner

    def open(self) -> None:
        """Find an engine, connect, and wait for its welcome. Raises what ``Finder.find`` raises; ``Unavailable``."""
        while not (self.stopping or self._cancelled()):
            if self._connection is None:
                self._connect(self.finder.generation if self.stalled else "")
            self._turn()
            if self.state.welcome:
                return
            if refused := self._refused():
                raise Unavailable(refused, retry_after=1.0)
            if self.timeout is not None and self._away > self.timeout:
                raise Unavailable(f"no engine answered within {self.timeout:g} seconds", retry_after=1.0)
        raise ShuttingDown("the client was closed")

    def _refused(self) -> str:
        """Why whoever listens there is not our engine; "" where nobody said so."""
        if self._refusals >= REFUSALS and not (self._connection is not None and self._connection.connected):
            return f"{self._endpoint} refuses us: the engine there has another key, or what listens there is no engine"
        return f"{self._endpoint}: {self.state.refused}" if self.state.refused else ""

    def run(self) -> None:
        """Until ``stop``: everything still running then fails with ``shutting_down``."""
        error: ServingError = ShuttingDown("the client was closed")
        try:
            while not self.stopping:
                if self._connection is None and (self.state.busy or self.keep):
                    self._reconnect()
                self._turn()
                self._tell_absence()
        except BaseException as broken:
            logger.exception("the engine's client ends")
            error = died(f"the client broke: {type(broken).__name__}")
            raise
        finally:
            self.stopping = True
            self._fail_all(error)
            self.close()

    def close(self) -> None:
        """Say goodbye and free all: idempotent."""
        self.stopping = True
        if self._connection is not None:
            self.state.outbox.append(m.encode(m.Goodbye()))
            self._flush()
        self._disconnect(linger=100)
        self._context.term()
        self.finder.close()
        self.poller.watch([])
        for fd in (self._wake_read, self._wake_write):
            if fd >= 0:
                os.close(fd)
        self._wake_read = self._wake_write = -1

    def forget(self) -> None:
        """In a forked child: let go of the parent's pipe; ZeroMQ's objects know their process and do nothing here."""
        for fd in (self._wake_read, self._wake_write):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._wake_read = self._wake_write = -1

    def _reconnect(self) -> None:
        try:
            self._connect(self.finder.generation if self.stalled else "")
            self._search.found()
        except NOT_FOUND as error:
            if told := self._search.failed(error):
                self._fail_all(told)

    def _fail_all(self, error: ServingError) -> None:
        """Behind the commands: what was handed over to another engine is not ours to fail."""
        self._run_commands()
        self.state.fail_all(error)

    def _connect(self, stalled: str) -> None:
        self._endpoint = self.finder.find(stalled, self._is_over)
        self.stalled = False
        self._connection = Connection(self._context, self._endpoint, self.finder.secret)
        self.poller.watch([self._wake_read, *self._connection.fds])
        self._still = 0.0
        self.state.hello(self.finder.client_id)

    def _is_over(self) -> bool:
        """Asked again and again by a search, which may take minutes: what runs here may be handed over meanwhile."""
        self._run_commands()
        return self.stopping

    def _disconnect(self, linger: int = 0) -> None:
        if self._connection is None:
            return
        self.poller.watch([self._wake_read])
        self._connection.close(linger)
        self._connection = None

    def _turn(self) -> None:
        self._count_time()
        self._run_commands()
        more = self._receive()
        if self._flush() or more:
            self.rest()
        elif self._pause() or self._is_dead():
            self._receive()  # what it said before it died
            self._lost()
            return
        self._watch()

    def _count_time(self) -> None:
        """In turns of this loop, so that our own sleep is not the engine's."""
        now = time.monotonic()
        passed = min(now - self._turned_at, 2 * TURN)
        self._turned_at = now
        self._still += passed
        self.step_age += passed
        if self.state.welcome:
            self._away = 0.0
        # of this host an engine is connected to when it is ready: one that then gives no welcome hangs
        elif (
            self._connection is None
            or not self._connection.connected
            or (self.finder.secret is None and self.state.info)
        ):
            self._away += passed

    def _tell_absence(self) -> None:
        """Say that no engine is there, to the log and, in the end, to those who wait for it."""
        if self.state.welcome:
            self._told = ""
            return
        reason = self._refused() or (f"no engine at {self._endpoint}" if self._away > QUIET_SECONDS else self._told)
        if reason != self._told:
            self._told = reason
            logger.warning("%s", reason)
        if self.away_timeout is not None and self._away > self.away_timeout:
            self._away = 0.0
            self._fail_all(Unavailable(self._refused() or "the engine is not running", retry_after=RETRY_AFTER))

    def _is_dead(self) -> bool:
        """The broken connection says it first, behind the last message; this is for one that does not break."""
        if self._turned_at - self._looked_at < TURN:
            return False
        self._looked_at = self._turned_at
        self._dead_turns = 0 if self._connection is None or self.finder.alive() else self._dead_turns + 1
        return self._dead_turns > DEAD_TURNS

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()(self.state)

    def _flush(self) -> bool:
        """Whether anything was sent."""
        return self._connection is not None and self._connection.send(self.state.outbox)

    def _pause(self) -> bool:
        """Wait for something to do; whether the connection has broken."""
        searching = self._connection is None and (self.keep or self.state.busy)
        ready = self.poller.poll(self._search.pause if searching else TURN)
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        if self._connection is None or not self._connection.is_broken(ready):
            return False
        self._refusals = 0 if self._connection.connected else self._refusals + 1
        return True

    def _receive(self) -> bool:
        """Take what has come; whether there may be more to do."""
        for _ in range(FRAMES_PER_TURN):
            frame = None if self._connection is None else self._connection.receive()
            if frame is None:
                return self._is_left()
            try:
                self.state.receive(frame)
            except msgspec.DecodeError as error:
                logger.warning("a message that cannot be read: %s", error)
        return True

    def _is_left(self) -> bool:
        """What the engine had taken it has failed itself; what it never saw is for the next one."""
        if self._connection is None or (self.state.closing is None and not self.state.lost):
            return False
        self._lost()
        return True

    def _lost(self) -> None:
        if self._connection is None:
            return
        self._disconnect()
        self.state.disconnected()
        self._still = 0.0

    def _watch(self) -> None:
        """Look whether the engine makes progress, and show one on another host that we live."""
        now = self._turned_at
        if self.state.moved:
            self.state.moved, self._still = False, 0.0
        if self.state.step_age is not None:
            self.step_age, self.state.step_age = self.state.step_age, None
        if self._connection is None or not (self.state.busy or self.keep or not self.state.welcome):
            return
        if self._still > self.stall_timeout:
            logger.warning("the engine makes no progress")
            self.stalled = True
            self._lost()
        elif self.finder.secret is not None and now - self._pinged_at > PING_INTERVAL:
            self._pinged_at = now
            self.state.outbox.append(m.encode(m.Ping()))
