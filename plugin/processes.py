"""The plugin's server processes: identify them across commands, watch them, and stop them."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_CONFLICT
from msgspec import Struct

from mlflow_llm.serving.http.gunicorn.listen_addresses import try_address

PROC = Path("/proc")
children: dict[int, subprocess.Popen[bytes]] = {}  # processes that this one has started and has to reap


class Birth(Struct, frozen=True, kw_only=True):
    """The identity of a process: its ``pid`` and when it started, since pids are reused.

    On systems with /proc, the start is ``ticks`` since the boot named ``boot``. Elsewhere it is ``started`` (seconds
    since 1970), which changes if the clock is set.
    """

    pid: int
    started: float
    boot: str = ""
    ticks: int = 0


def keep(process: subprocess.Popen[bytes]) -> Birth:
    """Return the identity of a child process, and reap it when it ends."""
    children[process.pid] = process
    boot, ticks = _boot(), _ticks(process.pid)
    started = psutil.Process(process.pid).create_time()
    return Birth(pid=process.pid, started=started, boot=boot if ticks else "", ticks=ticks)


def is_alive(birth: Birth) -> bool:
    if (child := children.get(birth.pid)) is not None:
        child.poll()  # until then, a child of ours that has ended is a zombie
    try:
        process = psutil.Process(birth.pid)
        if _has_ended(process):
            return False
        if birth.boot and (boot := _boot()):
            return birth.boot == boot and birth.ticks == _ticks(birth.pid)
        return abs(process.create_time() - birth.started) < 1.0
    except psutil.Error:
        return False


def _boot() -> str:
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if unknown.

    This is field 22 of stat in proc(5). The second field, the name, may itself contain spaces and brackets.
    """
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return int(fields[22 - 3])
    except (OSError, IndexError, ValueError):
        return 0


def listens(pid: int, port: int) -> bool:
    """Return whether a process, or one of its descendants, listens on ``port``."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return False
    return any(_listens(member, port) for member in family)


def _listens(process: psutil.Process, port: int) -> bool:
    sockets: Any = getattr(process, "net_connections", None) or process.connections  # the name in psutil 5
    with contextlib.suppress(psutil.Error):
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in sockets(kind="tcp"))
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def must_be_free(host: str, port: int, wait: float = 0.0) -> None:
    """Raise ``MlflowException`` if ``port`` is still in use after ``wait`` seconds."""
    end = time.monotonic() + wait
    while True:
        try:
            return try_address((host, port))
        except OSError as error:
            if time.monotonic() >= end:
                raise MlflowException(
                    f"cannot listen on {host}:{port}: {error.strerror}; choose another with port=…",
                    error_code=RESOURCE_CONFLICT,
                ) from None
        time.sleep(0.1)


def stop_process(pid: int, wait: float = 15.0) -> None:
    """End a process with SIGTERM, on which it drains; after ``wait`` seconds kill it and its children."""
    try:
        _signal_and_wait(pid, wait)
    finally:
        if (child := children.pop(pid, None)) is not None:
            child.poll()


def _signal_and_wait(pid: int, wait: float) -> None:
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        process.send_signal(signal.SIGTERM)
    except psutil.Error:
        return
    if not _ended_within([process], wait):
        for member in family:
            with contextlib.suppress(psutil.Error):
                member.kill()
        _ended_within(family, 5)


def _ended_within(processes: list[psutil.Process], seconds: float) -> bool:
    """Return whether all processes have ended within ``seconds``; zombies count as ended.

    PID 1 should reap the children of other commands but does not in many containers, and psutil calls a zombie running.
    """
    end = time.monotonic() + seconds
    while not all(_has_ended(process) for process in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended. A zombie whose threads are still ending has not: it still holds its port."""
    try:
        return not process.is_running() or (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1)
    except psutil.Error:
        return True
