"""An engine process: ``python -m mlflow_llm.serving.transport.engine_process.main SPEC``.

SPEC is a JSON file with a ``ProcessSpec``.

The model is loaded and run on the main thread, and nothing else in this process uses torch. The process has its own
session and forks once at the start, so it outlives the process that started it and leaves no zombie. It ends by itself
when its last client is gone. With a ``control_fd``, it is a warm standby (``standby``) until its engine dies.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec

from ...interface.engine import CoreFactory
from ...interface.errors import InvalidField, PackagingError
from ...interface.settings import EngineSettings
from ...model_files import downloads
from ...system import child, load_steps
from ...system.cpus import num_threads
from ...system.escape import configure
from ...system.file_locks import FileLock
from ..discovery.state_directory import LOG, SOCKET, STEP, RuntimeAdapter, StateDirectory, Status, check_private
from ..process_spec import ENGINE_CORE, MODULE, ProcessSpec
from .standby import Successor, WarmStandby, standby_settings
from .start_times import StartTimes

logger = logging.getLogger("mlflow_llm.engine")
STEP_SECONDS = 0.2  # between two writes of how far a step is


class Terminated(BaseException):
    """The process received SIGTERM or SIGQUIT while it loaded the model."""


def main(argv: list[str]) -> int:
    times = StartTimes()
    with open(argv[0], "rb") as file:
        spec = msgspec.json.decode(file.read(), type=ProcessSpec)
    if os.fork():
        os._exit(0)
    os.setsid()
    os.umask(0o077)
    state = StateDirectory(spec.runtime, spec.key)
    os.set_inheritable(spec.lock_fd, False)
    lock = FileLock(state.engine_lock_path, spec.lock_fd)
    configure(logging.INFO, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for ending in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(ending, _interrupt_load)
    successor = Successor(spec.control_fd, state, lock, spec.generation) if spec.control_fd >= 0 else None
    began = _log_size(state)
    logger.info("loading %s, pid %d", spec.bundle.content_hash, os.getpid())
    try:
        if successor is None:
            state.write_json("status.json", Status(state="loading", generation=spec.generation, pid=os.getpid()))
        return _serve(spec, state, lock, successor, began, times)
    except Terminated:
        if successor is None or successor.took_over:
            state.remove(state.lock(timeout=10.0))
        return 0
    except BaseException as error:
        if successor is None or successor.took_over:
            _report(state, spec, error)
        else:
            logger.exception("the standby ends")
        return 1
    finally:
        lock.give_away()  # without unlocking, since engine and standby hold the same lock


def _interrupt_load(signum: int, frame: FrameType | None) -> None:
    raise Terminated


def _log_size(state: StateDirectory) -> int:
    try:
        return os.stat(state.file(LOG)).st_size
    except OSError:
        return 0


def _serve(
    spec: ProcessSpec,
    state: StateDirectory,
    lock: FileLock,
    successor: Successor | None,
    began: int,
    times: StartTimes,
) -> int:
    """Load the model and serve until the loop ends. ``began`` is the log's size in bytes before the load."""
    set_threads(spec.settings)
    import zmq

    from .server import EngineServer

    context = zmq.Context()
    socket, remote = (None, None) if successor is not None else _bound(context, spec, state)
    if spec.core == ENGINE_CORE:
        from ...engine.models.import_trimming import import_lean

        import_lean()
    module, _, name = spec.core.partition(":")
    factory: CoreFactory = getattr(importlib.import_module(module), name)
    times.done("imports")
    downloads.hold(spec.bundle)
    if successor is None:
        load_steps.listen(step_writer(state))
    try:
        core = factory(spec.bundle, spec.settings)
    except InvalidField as error:  # another start with the same settings would fail as well
        raise PackagingError(str(error)) from None
    load_steps.listen(None)
    state.remove_file(STEP)
    times.done("weights")
    if successor is not None:
        successor.wait()
        state.remove_file(SOCKET)
        socket, remote = _bound(context, spec, state)
    info = msgspec.structs.replace(core.info, pid=os.getpid(), num_standbys=spec.settings.standby)
    standby = _warm_standby(spec, state, lock, info.kv_cache_memory)
    logger.info("kernels: %s; package: %s", info.kernels_summary, child.package_place())
    if info.max_num_batched_tokens:
        by = "as set" if spec.settings.max_num_batched_tokens else "by what was measured"
        logger.info("a step takes at most %d tokens, %s", info.max_num_batched_tokens, by)
    server = EngineServer(
        core,
        spec.settings,
        state,
        socket,
        info,
        spec.generation,
        remote=remote,
        adapter_dirs=spec.adapter_dirs,
        adapter_requests=spec.adapter_requests,
        journals=spec.journals,
        drain_timeout=spec.drain_timeout,
        in_place=lambda: lock.is_current,
        standby=standby,
    )
    server.reload_adapters(_predecessor(state))
    # systemd sends SIGTERM to all processes of a server, whose workers need their engine until they have drained
    end = server.stop if spec.listen is not None else server.leave
    signal.signal(signal.SIGTERM, lambda *_: end())
    signal.signal(signal.SIGQUIT, lambda *_: server.stop(at_once=True))
    gc.collect()
    gc.freeze()  # otherwise a full collection walks all objects of torch and transformers: a pause of 0.1 s
    times.done("waiting to take over, sockets" if successor is not None else "sockets")
    logger.info("start: %s", times)
    logger.info("ready, pid %d", os.getpid())
    state.keep_load_log(began)
    state.write_json("status.json", Status(state="ready", generation=spec.generation, pid=os.getpid()))
    try:
        server.run()
        if standby is not None:
            standby.dismiss()
    finally:
        for one in filter(None, (socket, remote)):
            one.close()
        context.term()
    return 0


def step_writer(state: StateDirectory) -> Callable[[load_steps.LoadStep], None]:
    """Return a listener that writes each step of the load to the state directory, where clients read it."""
    name, written = "", 0.0

    def write(step: load_steps.LoadStep) -> None:
        nonlocal name, written
        now = time.monotonic()
        if step.name == name and now - written < STEP_SECONDS:
            return
        name, written = step.name, now
        with contextlib.suppress(OSError):  # a full disk, or a directory that is gone: the load itself will tell
            state.write_json(STEP, step)

    return write


def _warm_standby(spec: ProcessSpec, state: StateDirectory, lock: FileLock, kv_cache_memory: int) -> WarmStandby | None:
    if not spec.settings.standby:
        return None
    settings = standby_settings(spec.settings, kv_cache_memory)

    def describe(generation: str, lock_fd: int, control_fd: int) -> ProcessSpec:
        places = {"generation": generation, "lock_fd": lock_fd, "control_fd": control_fd}
        return msgspec.structs.replace(spec, settings=settings, **places)

    return WarmStandby(MODULE, state, lock, describe, start_timeout=settings.start_timeout)


def _bound(context: Any, spec: ProcessSpec, state: StateDirectory) -> tuple[Any, Any]:
    """Bind the sockets for clients on this host and on other hosts.

    This happens before the model is loaded: if the port is taken, no time is lost on a load, and clients on other hosts
    see that an engine is starting.
    """
    return _local_socket(context, state), _remote_socket(context, spec)


def _local_socket(context: Any, state: StateDirectory) -> Any:
    """Bind the Unix socket in the state directory, which only this user can access."""
    socket = _router(context)
    socket.bind(f"ipc://{state.file(SOCKET)}")
    os.chmod(state.file(SOCKET), 0o600)
    return socket


def _remote_socket(context: Any, spec: ProcessSpec) -> Any:
    """Bind the TCP socket with CURVE; return None for an engine without ``listen``. Raises ``PackagingError``."""
    import zmq

    from ..auth import read_key, secure_server

    if spec.listen is None:
        return None
    socket = _router(context)
    secure_server(socket, read_key(spec.key_file))
    try:
        socket.bind(spec.listen)
    except zmq.ZMQError as error:
        raise PackagingError(f"{spec.listen}: {error.strerror}") from None
    return socket


def _router(context: Any) -> Any:
    import zmq

    socket = context.socket(zmq.ROUTER)
    # never drop an event for a slow client: the max_tokens of its requests limit the backlog
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    return socket


def set_threads(settings: EngineSettings) -> None:
    """Set the number of OpenMP threads; variables that the caller has set take precedence over our default.

    OpenMP reads them once, when torch is imported. How its threads wait is changed later, while the engine runs
    (``engine/devices/openmp.py``).
    """
    threads = str(settings.threads or num_threads())
    if settings.threads is not None:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = threads
    os.environ.setdefault("OMP_NUM_THREADS", threads)


def _predecessor(state: StateDirectory) -> dict[str, RuntimeAdapter]:
    """Return the adapters, by name, that a killed engine of this directory had loaded at run time."""
    try:
        with open(state.file("adapters.json"), "rb") as file:
            return msgspec.json.decode(file.read(), type=dict[str, RuntimeAdapter])
    except (OSError, msgspec.MsgspecError):
        return {}


def _report(state: StateDirectory, spec: ProcessSpec, error: BaseException) -> None:
    """Write the failure to ``status.json``, where waiting launchers and attachers read it."""
    logger.error("the engine ends", exc_info=error)
    found = state.read_status()
    if found is not None and found.state == "ready":
        return  # it did start: its clients notice its end and start another
    kind = "packaging" if isinstance(error, PackagingError) else "engine_died"
    reason = str(error).strip().split("\n")[0][:300] or type(error).__name__
    text = reason if kind == "packaging" else f"{type(error).__name__}: {reason}"
    status = Status(state="failed", generation=spec.generation, pid=os.getpid(), kind=kind, reason=text)
    try:
        check_private(state.path)
        state.write_json("status.json", status)
    except OSError:
        logger.exception("the state directory is gone")


def _main() -> None:
    code = main(sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # the threads of torch and ZeroMQ have nothing left to do that is worth waiting for
    os._exit(code)


if __name__ == "__main__":
    _main()
