"""Server processes of the plugin: identified across commands, watched, and ended."""

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
_children: dict[int, subprocess.Popen[bytes]] = {}  # those that this process started and has to reap


class Birth(Struct, frozen=True, kw_only=True):
    """The identity of a process: its ``pid`` and when it started, as pids are reused.

    ``ticks`` since the boot named ``boot``, where there is /proc; elsewhere ``started`` (seconds since 1970), which
    moves with the clock.
    """

    pid: int
    started: float
    boot: str = ""
    ticks: int = 0


def keep(process: subprocess.Popen[bytes]) -> Birth:
    """The identity of a child, which is reaped when it ends."""
    _children[process.pid] = process
    boot, ticks = _boot(), _ticks(process.pid)
    started = psutil.Process(process.pid).create_time()
    return Birth(pid=process.pid, started=started, boot=boot if ticks else "", ticks=ticks)


def is_alive(birth: Birth) -> bool:
    if (child := _children.get(birth.pid)) is not None:
        child.poll()  # a child of ours that has ended is a zombie until then
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
    """When a process started, in clock ticks since boot; 0 where nothing says so. Field 22 of proc(5)'s stat; the
    second one, the name, may have spaces and brackets of its own."""
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return int(fields[22 - 3])
    except (OSError, IndexError, ValueError):
        return 0


def listens(pid: int, port: int) -> bool:
    """Whether a process, or one that it started, listens on ``port``."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return False
    return any(_listens(member, port) for member in family)


def _listens(process: psutil.Process, port: int) -> bool:
    sockets: Any = getattr(process, "net_connections", None) or process.connections  # psutil 5 has the older name
    with contextlib.suppress(psutil.Error):
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in sockets(kind="tcp"))
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def must_be_free(host: str, port: int, wait: float = 0.0) -> None:
    """Raises ``MlflowException`` where ``port`` is still taken after ``wait`` seconds."""
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
    """End a process by SIGTERM, which drains; after ``wait`` seconds kill it, its children too."""
    try:
        _signal_and_wait(pid, wait)
    finally:
        if (child := _children.pop(pid, None)) is not None:
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
    """Whether all have ended within ``seconds``, zombies among them.

    PID 1 should reap other commands' children, which it does not in many containers; psutil calls a zombie running.
    """
    end = time.monotonic() + seconds
    while not all(_has_ended(process) for process in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _has_ended(process: psutil.Process) -> bool:
    """A zombie whose threads are still ending has its port still."""
    try:
        return not process.is_running() or (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1)
    except psutil.Error:
        return True
