"""The process that keeps a server's engines: it follows the endpoints' store and tells the workers what to serve.

``python -m mlflow_llm.serving.control.main DIRECTORY`` reads ``DIRECTORY/spec.json``, writes one JSON line of progress
for each step to standard output, ``{"stage": "ready"}`` once every endpoint has generated a token, and ends at the end
of its standard input, which the server holds open for as long as it lives, however it ends. Killed and started again,
it finds its engines running and goes on.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from .. import logs
from ..endpoints.config import ServedEntity
from ..endpoints.source import Source
from ..endpoints.store import Endpoints
from ..errors import PackagingError, ServingError
from ..metering.store import Store
from ..metering.store_checks import NoStore
from ..supervision.supervisor import Supervisor
from ..supervision.warm_up import generate_one
from .autoscaler import Scaler
from .model_sources import config_of, with_files
from .plan import Board
from .reconciler import TICK, Controller
from .resolver_pool import Resolvers
from .spec import ServeSpec, store_url

SPEC = "spec.json"
ORPHANED_SECONDS = 120.0  # for the workers' last replies, when the server was killed


def say(stage: str, **fields: object) -> None:
    with contextlib.suppress(BrokenPipeError):
        # unbuffered: what a server that is gone did not take would be complained of at the end
        os.write(sys.stdout.fileno(), json.dumps({"stage": stage, **fields}).encode() + b"\n")


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the server decides when we end
    logs.configure("warning")
    server, directory = os.getppid(), Path(argv[0])
    spec = msgspec.json.decode((directory / SPEC).read_bytes(), type=ServeSpec)
    over, changed = threading.Event(), threading.Event()
    threading.Thread(target=_await_end, args=(over, changed), daemon=True).start()
    try:
        store = Store(store_url(spec, directory))
    except (NoStore, ServingError) as error:
        say("failed", message=str(error))
        return 1
    board = Board(directory)
    supervisor = Supervisor(state_dir=spec.runtime_dir, prove=generate_one, changed=changed.set, in_use=board.in_use)
    endpoints = Endpoints(store, locate=_locate_nothing)
    resolvers = Resolvers(directory, limit=spec.settings.max_resolvers, timeout=spec.settings.resolve_timeout)
    found = functools.partial(with_files, find=resolvers)
    scaler = Scaler.of(spec.settings, store)
    controller = Controller(endpoints, supervisor, board, scaler, find=found, say=say, over=over)
    try:
        controller.start({endpoint.name: config_of(endpoint) for endpoint in spec.endpoints})
        say("ready")
        while not over.is_set():
            controller.tick()
            changed.wait(TICK)
            changed.clear()
    except (ServingError, PackagingError) as error:
        say("failed", message=str(error))
        return 1
    finally:
        controller.close()
        supervisor.close()
        if os.getppid() != server:
            _clear(board, directory)
    return 0


def _await_end(over: threading.Event, changed: threading.Event) -> None:
    while os.read(0, 4096):  # not sys.stdin: its lock, held here, would be waited for when the interpreter ends
        pass
    over.set()
    changed.set()


def _clear(board: Board, directory: Path) -> None:
    """Remove what the server can remove no more, once its workers have finished."""
    until = time.monotonic() + ORPHANED_SECONDS
    while board.held() and time.monotonic() < until:
        time.sleep(0.1)
    shutil.rmtree(directory, ignore_errors=True)


def _locate_nothing(entities: tuple[ServedEntity, ...]) -> tuple[Source, ...]:
    raise AssertionError("configs are made by workers and the command line")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
