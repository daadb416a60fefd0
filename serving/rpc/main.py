"""The process that serves gRPC: ``python -m mlflow_llm.serving.rpc.main DIRECTORY``.

It reads ``DIRECTORY/spec.json``, and the secret for prefix salts from the first line of its standard input. It writes
one JSON line to standard output, which says where it listens or why it does not. It drains and ends on SIGTERM, or when
its standard input is closed, which the server keeps open as long as it lives. SIGQUIT interrupts running requests.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gevent
import grpc
import msgspec
from gevent.event import Event

from ..control.main import SPEC, say
from ..control.settings import ServerSettings
from ..control.spec import ServeSpec
from ..frontend.offload import give_way
from ..frontend.shadow_runner import ShadowRunner
from ..frontend.worker_server import worker_server
from ..frontend.worker_state import WorkerState
from ..interface.errors import PackagingError, ServingError, ShuttingDown
from ..routing.load_shedding import DRAIN_RETRY_SECONDS
from ..system import logs
from .loop import Loop
from .service import Service
from .tls import credentials

MAX_THREADS = 256  # the most calls at once; each has a thread, which waits
TICK_SECONDS = 0.05
LAST_SECONDS = 2.0  # for responses that are already on their way
CUT_SHORT = ShuttingDown("the server stopped before the reply was complete", retry_after=DRAIN_RETRY_SECONDS)


class Process:
    """The state of the process that signals and the end of standard input change."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.ending = Event()
        self.at_once = False

    def drain(self) -> None:
        """Start the graceful end. Call this in the loop."""
        self.ending.set()

    def cut(self) -> None:
        """End at once. Call this in the loop."""
        self.at_once = True
        self.ending.set()

    def watch_stdin(self) -> None:
        """Wait for the end of standard input, then drain. Runs on its own thread."""
        while os.read(0, 4096):
            pass
        self.loop.soon(self.drain)


def main(argv: list[str]) -> int:
    """Run the process and return its exit status, 1 if the start failed."""
    directory = Path(argv[0])
    spec = msgspec.json.decode((directory / SPEC).read_bytes(), type=ServeSpec)
    secret = bytes.fromhex(sys.stdin.readline())
    logs.take_over(spec.settings.log_level, spec.settings.log_file)
    process = Process()
    gevent.signal_handler(signal.SIGTERM, process.drain)
    gevent.signal_handler(signal.SIGINT, process.cut)
    gevent.signal_handler(signal.SIGQUIT, process.cut)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    threading.Thread(target=process.watch_stdin, daemon=True).start()
    try:
        server = worker_server(spec, directory, secret)
        service = Service(server, process.loop)
        rpc = make_rpc_server(service, spec.settings)
        port = listen(rpc, spec.settings)
    except (ServingError, PackagingError, OSError) as error:
        say("failed", message=f"gRPC: {error}")
        return 1
    give_way()
    shadows = ShadowRunner(server, server.shadows)
    shadows.start()
    rpc.start()
    say("grpc", host=spec.settings.host, port=port, scheme="grpc" if spec.settings.tls_cert is None else "grpcs")
    process.ending.wait()
    shadows.stop(LAST_SECONDS)
    end(process, service, server, rpc)
    return 0


def make_rpc_server(service: Service, settings: ServerSettings) -> grpc.Server:
    """Return a gRPC server whose message limit is HTTP's body limit; a peer that answers no ping is disconnected."""
    quiet = int(settings.io_timeout * 1000)
    return grpc.server(
        ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="rpc"),
        handlers=(service.handler(),),
        maximum_concurrent_rpcs=MAX_THREADS,
        options=(
            ("grpc.max_receive_message_length", settings.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", 16384),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", quiet),
            ("grpc.keepalive_timeout_ms", quiet),
            ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ),
    )


def listen(rpc: grpc.Server, settings: ServerSettings) -> int:
    """Bind the server's address and return the port. Raises ``OSError`` if the address cannot be bound."""
    host = f"[{settings.host.strip('[]')}]" if ":" in settings.host else settings.host
    address = f"{host}:{settings.grpc_port}"
    secure = credentials(settings)
    try:
        found = rpc.add_insecure_port(address) if secure is None else rpc.add_secure_port(address, secure)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from None
    return int(found)


def end(process: Process, service: Service, server: WorkerState, rpc: grpc.Server) -> None:
    """Let running requests finish within ``drain_timeout``, interrupt the others, and settle the ledger."""
    server.load_shedder.draining = True
    logs.event("draining", running=service.num_active)
    until = time.monotonic() + server.settings.drain_timeout
    while service.num_active and time.monotonic() < until and not process.at_once:
        gevent.sleep(TICK_SECONDS)
    if service.num_active:
        logs.event("drain over", interrupted=server.in_flight.interrupt_all(CUT_SHORT))
    stopped = rpc.stop(LAST_SECONDS)  # refuses new calls, waits for running ones, then cuts off the others
    until = time.monotonic() + 2 * LAST_SECONDS
    while not stopped.is_set() and time.monotonic() < until:
        gevent.sleep(TICK_SECONDS)
    if server.payloads is not None:
        server.payloads.close(LAST_SECONDS)
    if server.ledger is not None:
        server.ledger.settle_open()
        server.ledger.close()
    if server.follower is not None:
        server.follower.close()


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)  # threads of calls may still wait for the loop, which has ended
