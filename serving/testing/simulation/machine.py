"""The operating system that simulated processes see.

While a schedule runs, the modules of the ledger and of its files find these in place of ``os``, ``time``,
``threading``, ``secrets``, ``random``, ``socket`` and ``shutil``. No module has to be written for it, and one that is
added to the metering is simulated without being named here. Code that runs outside of any actor, such as the checks of
a schedule, gets the real ones.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import pkgutil
import random
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ...metering import ledger, store
from ...metering.ledger import count_audit, slices, store_clock
from ...metering.ledger import ledger as ledger_module
from ...metering.store import group_commit
from .hosts import Process
from .scheduler import Actor, Event, Lock, Scheduler

_PACKAGE = __name__.partition(".testing")[0]
_METERING = f"{_PACKAGE}.metering"
_FILES = tuple(f"{_PACKAGE}.system.{name}" for name in ("backoff", "file_locks", "files", "journal", "progress"))


class Machine:
    """The machine of the schedule that runs: the process of each call is that of the actor that makes it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    @property
    def process(self) -> Process | None:
        """The calling actor's process, None outside of actors; there, time is the true time."""
        actor = self.scheduler.current
        if actor is None:
            return None
        assert isinstance(actor.process, Process)
        return actor.process

    def seam(self) -> Process | None:
        """Hand over to another actor, and return the calling process. Raises ``Killed``."""
        self.scheduler.pause()
        return self.process

    @property
    def is_quiet(self) -> bool:
        actor = self.scheduler.current
        return actor is None or actor.is_quiet


class _Module:
    """A stand-in for a module, which has everything else of it."""

    def __init__(self, machine: Machine, real: ModuleType) -> None:
        self._machine, self._real = machine, real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class SimulatedOs(_Module):
    """``os`` on the disk of the calling process's host."""

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        process = self._machine.seam()
        if process is not None and flags & os.O_CREAT and not self._machine.is_quiet and not os.path.exists(path):
            process.host.disk.check_room()
        descriptor = os.open(path, flags, mode)
        if process is not None:
            process.descriptors.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        process = self._machine.seam()
        if process is not None:
            process.descriptors.discard(descriptor)
        os.close(descriptor)

    def write(self, descriptor: int, data: bytes) -> int:
        process = self._machine.seam()
        if process is None or self._machine.is_quiet or not process.host.disk.is_full:
            return os.write(descriptor, data)
        some = self._machine.scheduler.draw.randrange(len(data))  # the last room of the disk
        if not some:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data[:some])

    def fsync(self, descriptor: int) -> None:
        process = self._machine.seam()
        if process is not None:
            process.host.disk.fsync(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
            self._machine.seam()

    def posix_fallocate(self, descriptor: int, offset: int, size: int) -> None:
        process = self._machine.seam()
        if process is not None and not self._machine.is_quiet:
            process.host.disk.check_room()
        os.posix_fallocate(descriptor, offset, size)

    def rename(self, path: Any, to: Any) -> None:
        process = self._machine.seam()
        if process is not None:
            process.host.disk.renamed(Path(path), Path(to))
        os.rename(path, to)

    def unlink(self, path: Any) -> None:
        self._machine.seam()
        os.unlink(path)

    def getpid(self) -> int:
        process = self._machine.process
        return os.getpid() if process is None else process.pid


class SimulatedTime(_Module):
    """``time`` by the clocks of the calling process's host."""

    def time(self) -> float:
        process = self._machine.process
        return self._machine.scheduler.now if process is None else process.host.wall()

    def monotonic(self) -> float:
        process = self._machine.process
        return self._machine.scheduler.now if process is None else process.host.since_boot()

    def clock_gettime(self, _clock: int) -> float:
        return self.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds`` or, on a busy machine, for up to a second: else whole schedules would be retries."""
        scheduler = self._machine.scheduler
        scheduler.sleep(max(seconds, scheduler.draw.random() ** 3))


class SimulatedThreading(_Module):
    """``threading`` with locks and events that hand over to other actors, and with actors for threads."""

    def Lock(self) -> Lock:  # noqa: N802  # its name there
        return Lock(self._machine.scheduler)

    def Event(self) -> Event:  # noqa: N802  # its name there
        return Event(self._machine.scheduler)

    def Thread(self, *, target: Callable[..., object], args: tuple[Any, ...] = (), name: str, **_: Any) -> Thread:  # noqa: N802  # its name there
        process = self._machine.process
        assert process is not None
        return Thread(self._machine.scheduler, process, f"{name} {process.name}", partial(target, *args))


class Thread:
    """A thread of a simulated process: an actor."""

    def __init__(self, scheduler: Scheduler, process: Process, name: str, work: Callable[[], object]) -> None:
        self._scheduler, self._process, self._name, self._work = scheduler, process, name, work
        self._actor: Actor | None = None

    def start(self) -> None:
        self._actor = self._scheduler.spawn(self._name, self._process, self._work)

    def join(self, timeout: float | None = None) -> None:
        actor = self._actor
        assert actor is not None
        self._scheduler.wait(lambda: actor.is_done, timeout)


class SimulatedSecrets(_Module):
    """``secrets`` that a seed knows."""

    def token_hex(self, size: int = 16) -> str:
        return f"{self._machine.scheduler.draw.getrandbits(8 * size):0{2 * size}x}"


class SimulatedRandom(_Module):
    """``random`` by the schedule's seed."""

    def uniform(self, low: float, high: float) -> float:
        return self._machine.scheduler.draw.uniform(low, high)


class SimulatedSocket(_Module):
    """``socket`` with the names of the simulated hosts."""

    def gethostname(self) -> str:
        process = self._machine.process
        return socket.gethostname() if process is None else process.host.name


class SimulatedShutil(_Module):
    """``shutil`` that removes a tree file by file, each at a seam."""

    def rmtree(self, path: Any, ignore_errors: bool = False) -> None:
        for folder, _, files in sorted(os.walk(path), reverse=True):
            for name in sorted(files):
                self._machine.seam()
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, name))
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _modules() -> list[ModuleType]:
    """Return the modules that are simulated: those of the metering without its migrations, and of its files."""
    for package in (ledger, store):
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)
    names = [name for name in sys.modules if name.startswith(_METERING) and ".migrations" not in name]
    return [sys.modules[name] for name in (*sorted(names), *_FILES)]


@contextlib.contextmanager
def simulated(machine: Machine, *, lends_freely: bool = False) -> Iterator[None]:
    """Put the simulated modules in place for the block. With ``lends_freely``, callers get slices of limits for one
    request a second and keep them for longer, since a schedule has few."""
    threads = SimulatedThreading(machine, threading)
    stands: dict[str, Any] = {
        "os": SimulatedOs(machine, os),
        "time": SimulatedTime(machine, time),
        "threading": threads,
        "secrets": SimulatedSecrets(machine, secrets),
        "random": SimulatedRandom(machine, random),
        "socket": SimulatedSocket(machine, socket),
        "shutil": SimulatedShutil(machine, shutil),
    }
    replaced: list[tuple[ModuleType, str, Any]] = []

    def replace(module: ModuleType, name: str, value: Any) -> None:
        replaced.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def boot_id() -> str:
        process = machine.process
        return "true" if process is None else process.host.boot_id

    try:
        for module in _modules():
            for name, stand in stands.items():
                if isinstance(getattr(module, name, None), ModuleType):
                    replace(module, name, stand)
        replace(store_clock, "boot_id", boot_id)
        replace(group_commit, "make_signal", threads.Event)
        replace(count_audit, "LOOK_AGAIN_SECONDS", 100.0)  # within the upkeep of a schedule's end
        if lends_freely:
            replace(slices, "WANTED_PER_SECOND", 1)
            replace(slices, "IDLE_SECONDS", 8.0)
            replace(ledger_module, "LEND_SECONDS", 1.0)
        yield
    finally:
        for module, name, value in reversed(replaced):
            setattr(module, name, value)
