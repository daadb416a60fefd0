"""gunicorn's parts, changed: a gevent worker that drains, an arbiter that a second SIGTERM stops, a JSON logger."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import gevent
from gevent.event import Event
from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer
from gunicorn.glogging import Logger
from gunicorn.workers.base_async import AsyncWorker
from gunicorn.workers.ggevent import GeventWorker

from ... import logs
from ...backoff import Backoff
from ...errors import ShuttingDown
from ...routing.load_shedding import DRAIN_RETRY_AFTER
from .. import request_smuggling
from .accept_balancing import WorkerSlot
from .connection_limits import ConnectionLimits
from .lingering_close import linger
from .slowloris import PlainHttp, TimedConnection
from .tls import Tls, gateway_tls, probe_tls
from .write_backpressure import BackpressureSocket

if TYPE_CHECKING:  # the arbiter loads this module too, and needs neither tokenizers nor torch
    from ..server import Server
    from .accepting import Acceptor

TICK = 0.1
TURN = 1.0  # seconds in which ``run`` shows the arbiter that it lives
READ = 1  # of the event loop's events
FLUSH_SECONDS = 2.0
LAST_SECONDS = 1.0
QUIT_SECONDS = 10.0
BOOT_PAUSES = (1.0, 30.0)  # seconds between workers that cannot begin: the first, the longest
PROBES = 64  # connections to the listener for probes
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
CUT_SHORT = ShuttingDown("the server stopped before the reply was complete", retry_after=DRAIN_RETRY_AFTER)


class DrainingWorker(GeventWorker):
    """On SIGTERM: new requests get a 503, running ones go on for ``drain_timeout``, then end with a final event. On
    SIGINT and SIGQUIT they end so at once."""

    wsgi: Any = None  # until it is loaded
    slot: WorkerSlot  # which the arbiter gives it
    tls: list[Tls]  # of its listeners
    at_once = False
    _called: Event  # set where ``run`` is to look at once
    answering = 0  # requests from their head to the last byte of their answer

    def init_process(self) -> None:
        # the arbiter's handlers, inherited, would only note a signal; nothing runs here yet that would have to end well
        for ending in ENDINGS:
            signal.signal(ending, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
        from .parse_errors import install

        install()
        self._called = Event()
        super().init_process()

    def init_signals(self) -> None:
        super().init_signals()
        # a terminal that closes signals the whole group; the arbiter decides what that means
        for ignored in (signal.SIGHUP, signal.SIGUSR2):
            signal.signal(ignored, signal.SIG_IGN)

    @property
    def server(self) -> Server:
        served: Server = self.wsgi.extensions["mlflow_llm"]
        return served

    def load_wsgi(self) -> None:
        # a worker that has not begun to serve would keep the address while it looks for engines that end as well
        watching = gevent.spawn(self._end_with_arbiter)
        try:
            super().load_wsgi()
        finally:
            watching.kill()

    def _end_with_arbiter(self) -> None:
        while os.getppid() == self.ppid:
            gevent.sleep(TICK)
        os._exit(0)

    def notify(self) -> None:
        # instead of the parent's, which ends a worker in the middle of its replies when the arbiter is gone
        AsyncWorker.notify(self)

    def serve(self, listener: Any, tls: Tls | None, connection: TimedConnection) -> None:
        from .parse_errors import refuse

        # instead of the parent's handle, which sets no time: a peer that takes no byte loses its connection
        connection.plain.settimeout(self.server.settings.io_timeout)
        if tls is not None:
            try:
                connection.start_tls(tls.context)
            except PlainHttp as error:
                refuse(connection.plain, error, connection.address)
                return
            except OSError as error:  # a scanner, a client that trusts another authority, one without a certificate
                reason = getattr(error, "reason", None) or type(error).__name__
                logs.event("no TLS connection", level=10, address=connection.address, error=str(reason))
                return
        AsyncWorker.handle(self, listener, connection, connection.peer)

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> None:
        from ..keep_alive import RequestBody, asks_to_close

        request_smuggling.check(req)
        request_smuggling.strict(req)
        if asks_to_close(req.headers):
            req.force_close()
        req.body = body = RequestBody(req, sock)
        if sock.is_secure:
            req.scheme = "https"
        self.answering += 1
        try:
            now = None if sock.is_secure else sock.send_now
            answer = BackpressureSocket(sock.plain, sock.send, now, chunked=req.version > (1, 0))
            super().handle_request(listener_name, req, answer, addr)
        except StopIteration:  # how gunicorn says that the connection ends
            if not body.is_whole:
                with sock.leaving():
                    linger(sock.plain)
            raise
        finally:
            self.answering -= 1

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        from .parse_errors import refuse

        if refuse(client.plain, exc, addr[0] if addr else "", client.request):
            with client.leaving():
                linger(client.plain)
        else:
            super().handle_error(req, client.plain, addr, exc)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.wsgi is None:
            os._exit(0)
        self.alive = False
        self.server.load_shedder.draining = True
        self._called.set()

    def handle_quit(self, sig: int, frame: Any) -> None:
        # at once: what runs is cut short and settled, and what that takes is bounded by the kernel, should our loop
        # stand still; engine and ledger take our death then as they take kill -9
        if self.wsgi is None:
            os._exit(0)
        if not self.at_once:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, QUIT_SECONDS)
        self.at_once = True
        self.handle_exit(sig, frame)

    def run(self) -> None:
        self.tls = []
        acceptors = [self._listen(sock, probes=number > 0) for number, sock in enumerate(self.sockets)]
        self.slot.open()
        with self._arbiters_end():
            while self.alive:
                if os.getppid() != self.ppid:
                    logs.event("the arbiter is gone; the worker drains and ends", level=30)
                    break
                self.notify()
                for tls in self.tls:
                    tls.look()
                self._called.wait(TURN)
        self._drain()
        if self.server.ledger is not None:
            self.server.ledger.settle_open()  # of clients that take nothing, so that no error reached their requests
        for acceptor in acceptors:
            acceptor.close()
        for acceptor in acceptors:
            acceptor.greenlets.join(timeout=LAST_SECONDS)
            acceptor.greenlets.kill(timeout=LAST_SECONDS)
        if self.server.ledger is not None:
            self.server.ledger.close()
        if self.server.follower is not None:
            self.server.follower.close()

    @contextlib.contextmanager
    def _arbiters_end(self) -> Iterator[None]:
        """``_called`` is set when the arbiter ends; a kernel that does not say so leaves it to ``run``'s next turn."""
        try:
            fd = os.pidfd_open(self.ppid)
        except OSError:
            yield
            return
        watcher = gevent.get_hub().loop.io(fd, READ)
        watcher.start(self._called.set)
        try:
            yield
        finally:
            watcher.stop()
            watcher.close()
            os.close(fd)

    def _listen(self, sock: Any, *, probes: bool) -> Acceptor:
        """Accept at ``sock``: the gateway's listener, or that for probes, whose connections are counted apart."""
        from .accepting import Acceptor

        settings = self.server.settings
        sock.setblocking(1)
        slot = None if probes else self.slot
        if (tls := (probe_tls if probes else gateway_tls)(settings)) is not None:
            self.tls.append(tls)
        if probes:
            limits = ConnectionLimits(PROBES, PROBES)
        else:
            limits = ConnectionLimits(
                settings.max_connections, settings.most_of_an_address, on_release=self.slot.remove
            )
        acceptor = Acceptor(
            sock,
            partial(self.serve, sock, tls),
            limits=limits,
            slot=slot,
            make=partial(self._connection, probes=probes),
            io_timeout=settings.io_timeout,
            secure=tls is not None,
        )
        acceptor.start()
        return acceptor

    def _connection(self, client: Any, peer: Any, address: str, *, probes: bool) -> TimedConnection:
        settings = self.server.settings
        first = settings.first_byte_timeout
        return TimedConnection(
            client, settings.io_timeout, first_timeout=first, peer=peer, address=address, probes=probes
        )

    def _drain(self) -> None:
        """Wait for what runs; what is left at the end is interrupted and gets a moment to send its last event."""
        self.server.load_shedder.draining = True
        self.slot.close()
        logs.event("draining", running=self.answering)
        self._wait(self.server.settings.drain_timeout, lambda: self.at_once)
        if left := self.answering:
            self.server.in_flight.interrupt_all(CUT_SHORT)
            logs.event("drain over", interrupted=left)
            self._wait(FLUSH_SECONDS)

    def _wait(self, seconds: float, over: Callable[[], bool] = lambda: False) -> None:
        until = time.monotonic() + seconds
        while self.answering and time.monotonic() < until and not over():
            self.notify()
            gevent.sleep(TICK)


class ServerArbiter(Arbiter):
    """The first SIGTERM drains, the next one stops at once; SIGHUP, of a terminal that closes, drains too. gunicorn's
    signals for reloading and for more or fewer workers mean nothing: the spec says what is served. It keeps the
    controller process running, as it does the workers; one that cannot begin ends a server that has never served, and
    is tried again where it has: whatever is full may be emptied."""

    terminated = False
    _has_served = False
    _not_before = 0.0  # by the monotonic clock

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self._pauses = Backoff(*BOOT_PAUSES)

    def manage_workers(self) -> None:
        self.app.keep_processes()
        if self.app.balancer.num_open >= self.num_workers:
            self._pauses.succeeded()
        super().manage_workers()

    def spawn_workers(self) -> None:
        if time.monotonic() >= self._not_before:
            super().spawn_workers()

    def reap_workers(self) -> None:
        before = dict(self.WORKERS)
        self._has_served = self._has_served or self.app.balancer.num_open > 0  # the slots of the dead are still theirs
        try:
            super().reap_workers()
        except HaltServer:
            if not self._has_served:
                raise
            for pid in before.keys() - self.WORKERS.keys():  # what the parent has not done of one; of others it is done
                before[pid].tmp.close()
                self.cfg.child_exit(self, before[pid])
            pause = self._pauses.failed()
            self._not_before = time.monotonic() + pause
            logs.event("a worker could not begin; it is tried again", level=40, seconds=pause)

    def spawn_worker(self) -> Any:
        """With the signals that end it held back until the worker answers them itself: one in between would be lost."""
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
        try:
            return super().spawn_worker()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)

    def init_signals(self) -> None:
        of_hangup = signal.getsignal(signal.SIGHUP)
        super().init_signals()
        if of_hangup is signal.SIG_IGN:  # nohup
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for ignored in (signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR2):
            signal.signal(ignored, signal.SIG_IGN)

    def signal(self, sig: int, frame: Any) -> None:
        if sig == signal.SIGHUP:
            if self.terminated:  # shell and kernel may both say it
                return
            sig = signal.SIGTERM
        if sig == signal.SIGTERM and self.terminated:
            sig = signal.SIGQUIT
        self.terminated = self.terminated or sig == signal.SIGTERM
        if sig in ENDINGS and self.app.rpc is not None:
            self.app.rpc.signal(signal.SIGTERM if sig == signal.SIGTERM else signal.SIGQUIT)
        super().signal(sig, frame)


class JsonLogger(Logger):
    """gunicorn's own messages as the server's JSON lines; a stalled client is no fault."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        for handler in self.error_log.handlers:
            handler.setFormatter(logs.JsonLines())

    def exception(self, msg: str, *args: Any, **kwargs: Any) -> None:
        if isinstance(sys.exc_info()[1], TimeoutError):
            logs.event("a client stalled; its connection is closed")
            return
        super().exception(msg, *args, **kwargs)
