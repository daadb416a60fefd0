"""gunicorn's classes, adapted: a gevent worker that drains, an arbiter that a second SIGTERM stops, a JSON logger."""

from __future__ import annotations

import contextlib
import logging
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

from ...interface.errors import ShuttingDown
from ...routing.load_shedding import DRAIN_RETRY_SECONDS
from ...system import logs
from ...system.backoff import Backoff
from ..wire import request_smuggling
from .accept_balancing import WorkerSlot
from .connection_limits import ConnectionLimits
from .lingering_close import linger
from .slowloris import PlainHttp, TimedConnection
from .tls import Tls, gateway_tls, probe_tls
from .write_backpressure import BackpressureSocket

if TYPE_CHECKING:  # the arbiter imports this module too, and must load neither tokenizers nor torch
    from ...batches.runner import BatchRunner
    from ...frontend.shadow_runner import ShadowRunner
    from ...frontend.worker_state import WorkerState
    from .accepting import Acceptor

CHECK_SECONDS = 0.1
HEARTBEAT_SECONDS = 1.0  # seconds between the heartbeats of ``run`` to the arbiter
READ = 1  # the event loop's flag for "readable"
FLUSH_SECONDS = 2.0
LAST_SECONDS = 1.0
QUIT_SECONDS = 10.0
BOOT_PAUSES = (1.0, 30.0)  # seconds between attempts while workers cannot start: the first and the longest pause
MAX_PROBES = 64  # maximum number of connections to the listener for probes
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
CUT_SHORT = ShuttingDown("the server stopped before the reply was complete", retry_after=DRAIN_RETRY_SECONDS)


class DrainingWorker(GeventWorker):
    """A worker that drains on SIGTERM: new requests get a 503, running ones go on for ``drain_timeout``, then end with
    a final event. On SIGINT and SIGQUIT they end that way at once."""

    wsgi: Any = None  # None until it is loaded
    slot: WorkerSlot  # assigned by the arbiter
    tls: list[Tls]  # one for each listener that has TLS
    at_once = False
    _called: Event  # set when ``run`` must act at once
    answering = 0  # number of requests between their head and the last byte of their response

    def init_process(self) -> None:
        # the handlers inherited from the arbiter would only record a signal; nothing here needs a clean end yet
        for ending in ENDINGS:
            signal.signal(ending, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
        from .parse_errors import install

        install()
        self._called = Event()
        super().init_process()

    def init_signals(self) -> None:
        super().init_signals()
        # a closing terminal signals the whole process group; the arbiter decides what that means
        for ignored in (signal.SIGHUP, signal.SIGUSR2):
            signal.signal(ignored, signal.SIG_IGN)

    @property
    def server(self) -> WorkerState:
        served: WorkerState = self.wsgi.extensions["mlflow_llm"]
        return served

    def load_wsgi(self) -> None:
        # otherwise a worker that is still starting would hold the address, waiting for engines that are ending too
        watching = gevent.spawn(self._end_with_arbiter)
        try:
            super().load_wsgi()
        finally:
            watching.kill()

    def _end_with_arbiter(self) -> None:
        while os.getppid() == self.ppid:
            gevent.sleep(CHECK_SECONDS)
        os._exit(0)

    def notify(self) -> None:
        # replaces the method of the base class, which ends a worker in the middle of its replies if the arbiter is gone
        AsyncWorker.notify(self)

    def serve(self, listener: Any, tls: Tls | None, connection: TimedConnection) -> None:
        from .parse_errors import refuse

        # replaces the base class's ``handle``, which sets no timeout: a peer that reads nothing loses its connection
        connection.plain.settimeout(self.server.settings.io_timeout)
        if tls is not None:
            try:
                connection.start_tls(tls.context)
            except PlainHttp as error:
                refuse(connection.plain, error, connection.address)
                return
            except OSError as error:  # a scanner, a client that does not trust our CA, or one without a certificate
                reason = getattr(error, "reason", None) or type(error).__name__
                logs.event("no TLS connection", level=10, address=connection.address, error=str(reason))
                return
        AsyncWorker.handle(self, listener, connection, connection.peer)

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> None:
        from ..wire.keep_alive import RequestBody, asks_to_close

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
        except StopIteration:  # gunicorn's sign that the connection ends
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
        # end at once: running requests are cut short and settled. A kernel timer bounds the time for that, in case the
        # event loop is blocked; if it fires, engine and ledger handle our death as they handle kill -9
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
        runner = self._run_batches()
        shadows = self._run_shadows()
        with self._arbiters_end():
            while self.alive:
                if os.getppid() != self.ppid:
                    logs.event("the arbiter is gone; the worker drains and ends", level=30)
                    break
                self.notify()
                for tls in self.tls:
                    tls.look()
                self._called.wait(HEARTBEAT_SECONDS)
        if runner is not None:
            runner.stop()
        shadows.stop(LAST_SECONDS)
        self._drain()
        if runner is not None:
            runner.join(LAST_SECONDS)
        if self.server.ledger is not None:
            # for clients that read nothing: their requests were blocked in a write, so the interrupt did not reach them
            self.server.ledger.settle_open()
        for acceptor in acceptors:
            acceptor.close()
        for acceptor in acceptors:
            acceptor.greenlets.join(timeout=LAST_SECONDS)
            acceptor.greenlets.kill(timeout=LAST_SECONDS)
        if self.server.payloads is not None:
            self.server.payloads.close(FLUSH_SECONDS)
        if self.server.ledger is not None:
            self.server.ledger.close()
        if self.server.follower is not None:
            self.server.follower.close()

    def _run_batches(self) -> BatchRunner | None:
        """Start to run batches, if there is a database for them and this server is to run any."""
        if self.server.ledger is None or self.server.settings.batch_concurrency == 0:
            return None
        from ...batches.runner import BatchRunner

        runner = BatchRunner(self.server, self.server.ledger)
        runner.start()
        return runner

    def _run_shadows(self) -> ShadowRunner:
        """Start to run copies of requests for endpoints with shadows."""
        from ...frontend.shadow_runner import ShadowRunner

        runner = ShadowRunner(self.server, self.server.shadows)
        runner.start()
        return runner

    @contextlib.contextmanager
    def _arbiters_end(self) -> Iterator[None]:
        """Set ``_called`` when the arbiter ends. Without ``pidfd_open``, ``run`` notices the end at its next turn."""
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
        """Accept at ``sock``: the gateway's listener, or that for probes, whose connections are counted separately."""
        from .accepting import Acceptor

        settings = self.server.settings
        sock.setblocking(1)
        slot = None if probes else self.slot
        if (tls := (probe_tls if probes else gateway_tls)(settings)) is not None:
            self.tls.append(tls)
        if probes:
            limits = ConnectionLimits(MAX_PROBES, MAX_PROBES)
        else:
            limits = ConnectionLimits(settings.max_connections, settings.max_of_an_address, on_release=self.slot.remove)
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
        """Wait for the running requests, then interrupt the rest and give them a moment to send their last event."""
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
            gevent.sleep(CHECK_SECONDS)


class ServerArbiter(Arbiter):
    """An arbiter that drains on the first SIGTERM and stops at once on the next one.

    SIGHUP, which a closing terminal sends, drains too. gunicorn's signals for reloading and for more or fewer workers
    are ignored: only the spec says what is served. The arbiter keeps the controller process running as it does the
    workers. A worker that cannot start ends a server that has never served; later it is tried again, because the cause,
    such as a full disk, may go away.
    """

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
        self._has_served = self._has_served or self.app.balancer.num_open > 0  # dead workers still have their slots
        try:
            super().reap_workers()
        except HaltServer:
            if not self._has_served:
                raise
            # the error kept the base class from cleaning up after one of these; for the others this is done already
            for pid in before.keys() - self.WORKERS.keys():
                before[pid].tmp.close()
                self.cfg.child_exit(self, before[pid])
            pause = self._pauses.failed()
            self._not_before = time.monotonic() + pause
            logs.event("a worker could not start; it is tried again", level=40, seconds=pause)

    def spawn_worker(self) -> Any:
        """Start a worker with ending signals blocked until it handles them itself; an earlier one would be lost."""
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
            if self.terminated:  # shell and kernel may both send it
                return
            sig = signal.SIGTERM
        if sig == signal.SIGTERM and self.terminated:
            sig = signal.SIGQUIT
        self.terminated = self.terminated or sig == signal.SIGTERM
        if sig in ENDINGS and self.app.rpc is not None:
            self.app.rpc.signal(signal.SIGTERM if sig == signal.SIGTERM else signal.SIGQUIT)
        super().signal(sig, frame)


class JsonLogger(Logger):
    """A logger that writes gunicorn's own messages as the server's JSON lines; a stalled client is not logged as an
    error."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        self.error_log.handlers[:] = logging.getLogger(logs.PACKAGE).handlers

    def exception(self, msg: str, *args: Any, **kwargs: Any) -> None:
        if isinstance(sys.exc_info()[1], TimeoutError):
            logs.event("a client stalled; its connection is closed")
            return
        super().exception(msg, *args, **kwargs)
