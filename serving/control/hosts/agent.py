"""A host that has joined a database to run engines: it offers itself, and runs what the leader places on it.

::

    placed ──► found ──► LOADING ──► READY        found: the model is fetched by its URI, and has the content hash
       └─────────┴──────────┴──────► FAILED       FAILED: the host says why, and tries again
    not placed any more, or this host ends ──► the engine drains, and ends
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from ...endpoints.config import EntityConfig, ModelSource
from ...endpoints.engine_hosts import EngineHost, EngineHosts, HostedEngine, Offer, Placement
from ...interface.engine import Engine
from ...interface.errors import Conflict, PackagingError, ServingError
from ...interface.settings import GRANTED, EngineSettings
from ...supervision.engine_host import end_engine
from ...supervision.engine_spec import EngineSpec
from ...supervision.supervisor import Supervisor
from ...transport.auth import check_address
from ...transport.discovery.state_directory import StateDirectory
from ...transport.process_spec import ENGINE_CORE
from ..engine_memory import GIB, estimated_size
from .host_adapters import HostAdapters
from .journals import HostJournals

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
CHECK_SECONDS = 0.1
SOON_SECONDS = 0.2  # between beats while an engine starts
UNUSED_SECONDS = 60.0
"""How long a host that was started for one engine waits for it: without, its deployment is gone."""
KEEP_SECONDS = 5.0
"""How long an engine that is not placed here any more runs on: after a silence it is placed here again."""
FIND_AGAIN_SECONDS = 30.0  # before a model that could not be fetched is looked up again
WILDCARDS = ("0.0.0.0", "[::]", "*")
Find = Callable[[EntityConfig], EntityConfig]
Say = Callable[..., object]


class _Run:
    """An engine that is placed here, from the lookup of its model to its end. ``id`` is that of its newest
    placement."""

    def __init__(self, placement: Placement, work: Future[EngineSpec]) -> None:
        self.id, self.placement, self.work = placement.id, placement, work
        self.spec: EngineSpec | None = None
        self.failed = ""
        self.failed_at = 0.0
        self.unplaced_since: float | None = None


class HostAgent:
    """The agent of a joined host. One thread runs it; ``stop`` may be called from others and in signal handlers.

    ``find`` fetches the model of an entity and raises ``PackagingError``, ``ServingError``. ``listen``
    (``tcp://host:port``) is the first address of its engines, the next ones have the ports after it; ``key_file`` has
    the key of their clients. ``grants`` are engine settings that run code which is not this package's, as this host
    allows them, and ``adapter_dirs`` where adapters may be loaded from. ``journals`` count what its engines
    generate, and ``adapters`` fetches the contents that they ask for. ``probe(engine)`` raises while an engine cannot
    work.
    """

    def __init__(
        self,
        hosts: EngineHosts,
        offer: Offer,
        *,
        host: str,
        name: str,
        listen: str,
        key_file: str,
        find: Find,
        probe: Callable[[Engine], object],
        grants: Mapping[str, Any] | None = None,
        adapter_dirs: tuple[str, ...] = (),
        drain_timeout: float = 30.0,
        state_dir: str | None = None,
        journals: HostJournals | None = None,
        adapters: HostAdapters | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        say: Say = lambda stage, **fields: None,
    ) -> None:
        self._hosts, self._find, self._say = hosts, find, say
        self._address, self._first_port = reachable(listen)
        self._key_file, self._drain_timeout, self._state_dir = key_file, drain_timeout, state_dir
        self._journals, self._adapters = journals, adapters
        self._grants, self._adapter_dirs, self._monotonic = dict(grants or {}), adapter_dirs, monotonic
        self._own = EngineHost(
            host=host,
            name=name,
            started_ms=int(clock() * 1000),
            generation=0,
            beat=secrets.randbits(32),
            offer=offer,
        )
        self._supervisor = Supervisor(state_dir=state_dir, probe=probe)
        self._runs: dict[str, _Run] = {}  # by engine
        self._before: dict[str, str] = {}  # addresses, by placement, of engines that an earlier command has started
        self._finders = ThreadPoolExecutor(2, thread_name_prefix="find")
        self._enders: list[threading.Thread] = []
        self._unused_since: float | None = None
        self._over, self._at_once = threading.Event(), threading.Event()

    def stop(self) -> None:
        """End the host. The first call lets running requests finish or move within the drain timeout; the second ends
        them at once."""
        if self._over.is_set():
            self._at_once.set()
        self._over.set()

    def run(self) -> None:
        """Run until ``stop``. Raises ``Conflict`` if another process joins as this host."""
        self.join()
        if self._journals is not None:
            self._journals.start()
        try:
            while not self._over.is_set():
                self.tick()
                is_asked = self._adapters is not None and self._adapters.tick()
                self._over.wait(SOON_SECONDS if is_asked or self._is_busy() else BEAT_SECONDS)
            self._leave_slowly()
        finally:
            self.close()

    def join(self) -> None:
        """Join the database. Raises ``Unavailable``."""
        self._own = self._hosts.join(self._own)
        self._before = {one: said.address for one, said in self._own.engines.items() if said.address}
        offer = self._own.offer
        gpus = ", ".join(one.name for one in offer.devices) or "none"
        self._say("joined", host=self._own.name, memory=offer.memory, cpus=offer.cpus, gpus=gpus)

    def tick(self) -> None:
        """Report, and act on what is placed here. A database that does not answer changes nothing here."""
        self._own = msgspec.structs.replace(
            self._own,
            beat=self._own.beat + 1,
            engines={run.id: self._state(engine, run) for engine, run in self._runs.items()},
            draining=self._over.is_set(),
        )
        try:
            placed = self._hosts.beat(self._own)
        except Conflict:
            raise
        except ServingError as error:
            logger.warning("the database: %s", error)
            return
        self._follow({one.engine: one for one in placed})
        if self._own.offer.start is not None and self._is_unused():
            self._over.set()

    def _is_unused(self) -> bool:
        """Return whether nothing has been placed here for so long that this host is not wanted any more."""
        if self._runs:
            self._unused_since = None
            return False
        now = self._monotonic()
        self._unused_since = now if self._unused_since is None else self._unused_since
        return now - self._unused_since >= UNUSED_SECONDS

    def _is_busy(self) -> bool:
        return any(self._state(engine, run).state == "LOADING" for engine, run in self._runs.items())

    def _follow(self, placed: Mapping[str, Placement]) -> None:
        now = self._monotonic()
        for engine in self._runs.keys() - placed.keys():
            left = self._runs[engine]
            left.unplaced_since = now if left.unplaced_since is None else left.unplaced_since
            if self._over.is_set() or now - left.unplaced_since >= KEEP_SECONDS:
                self._end(engine)
        for engine, placement in placed.items():
            run = self._runs.get(engine)
            if run is None:
                self._say("placed", model=str(placement.entity.model.identity))
                self._runs[engine] = self._new(placement)
                continue
            run.id, run.placement, run.unplaced_since = placement.id, placement, None
            if run.spec is None and run.failed and now - run.failed_at > FIND_AGAIN_SECONDS:
                self._runs[engine] = self._new(placement)
            elif run.spec is None and not run.failed and run.work.done():
                self._start(engine, run)

    def _new(self, placement: Placement) -> _Run:
        return _Run(placement, self._finders.submit(self._found, placement))

    def _found(self, placement: Placement) -> EngineSpec:
        """Return the engine of a placement, with its model's files on this host."""
        source = placement.entity.model
        settings = self._granted(source.engine)
        # without paths: those of the gateway that has placed it say nothing about this host
        bundle = msgspec.structs.replace(source.bundle, model_dir="", tokenizer_dir="", adapters={})
        own = msgspec.structs.replace(source, bundle=bundle, key_file=None, addresses=(), engine=settings)
        found = self._find(msgspec.structs.replace(placement.entity, source=own, placement=None)).model
        return EngineSpec(bundle=found.bundle, settings=settings, core=source.core or ENGINE_CORE)

    def _granted(self, settings: EngineSettings) -> EngineSettings:
        """Return ``settings`` with this host's grants. Raises ``PackagingError`` for one that it does not grant."""
        for name in GRANTED:
            if getattr(settings, name) and name not in self._grants:
                text = f"{name} decides about code that runs here: this host has not joined with -C {name}=…"
                raise PackagingError(text)
        return msgspec.structs.replace(settings, **self._grants)

    def _start(self, engine: str, run: _Run) -> None:
        try:
            spec = run.work.result()
            self._check_room(engine, spec)
            spec = self._listening(run, spec)
            self._supervisor.add(engine, spec)
            run.spec = spec
        except (PackagingError, ServingError, OSError) as error:
            run.failed, run.failed_at = str(error), self._monotonic()
            self._say("failed", model=str(run.placement.entity.model.identity), message=run.failed)

    def _check_room(self, engine: str, spec: EngineSpec) -> None:
        """Raise ``PackagingError`` if the engine's files are more than what this host offers and others leave.

        The memory of GPUs is checked by the engine itself, when it loads.
        """
        if self._own.offer.devices and spec.settings.device != "cpu":
            return
        others = [run.spec for key, run in self._runs.items() if key != engine and run.spec is not None]
        left = self._own.offer.memory - sum(map(_size, others))
        if (size := _size(spec)) > left:
            text = f"it has files of {size / GIB:.2f} GiB, and this host has {max(left, 0) / GIB:.2f} GiB left"
            raise PackagingError(text)

    def _listening(self, run: _Run, spec: EngineSpec) -> EngineSpec:
        """Return ``spec`` at an address of this host: that of an engine of an earlier command which still runs, or a
        free one."""
        spec = msgspec.structs.replace(
            spec,
            key_file=self._key_file,
            adapter_dirs=self._adapter_dirs,
            adapter_requests="" if self._adapters is None else self._adapters.directory,
            journals="" if self._journals is None else self._journals.root,
            drain_timeout=self._drain_timeout,
        )
        if before := self._before.get(run.id):
            known = msgspec.structs.replace(spec, listen=before)
            if StateDirectory(*os.path.split(known.address(0, self._state_dir))).engine_alive:
                return known
        taken = {one.spec.listen for one in self._runs.values() if one.spec is not None}
        for port in range(self._first_port, 65536):
            address = f"tcp://{self._address}:{port}"
            if address not in taken and _is_free(self._address, port):
                return msgspec.structs.replace(spec, listen=address)
        raise PackagingError(f"no port of {self._address} from {self._first_port} on is free")

    def _state(self, engine: str, run: _Run) -> HostedEngine:
        if run.failed:
            return HostedEngine(state="FAILED", message=run.failed[:1000])
        if run.spec is None:
            return HostedEngine(state="LOADING")
        replica = next(iter(self._supervisor.status(engine).replicas), None)
        if replica is None or (replica.state != "failed" and not replica.was_ready):
            return HostedEngine(state="LOADING")
        if replica.state == "failed" and not replica.was_ready:
            return HostedEngine(state="FAILED", message=replica.message[:1000])
        # clients of an engine that is being restarted wait for it there; one that fails then says so
        message = replica.message[:1000] if replica.state == "failed" else ""
        state: Any = "FAILED" if replica.state == "failed" else "READY"
        return HostedEngine(state=state, address=run.spec.listen or "", message=message)

    def _end(self, engine: str) -> None:
        """Drain and end an engine that is not placed here any more."""
        run = self._runs.pop(engine)
        run.work.cancel()
        if run.spec is None:
            return
        self._say("draining", model=str(run.placement.entity.model.identity), seconds=self._drain_timeout)
        state = StateDirectory(*os.path.split(run.spec.address(0, self._state_dir)))
        self._supervisor.remove(engine)
        timeout = self._drain_timeout
        ender = threading.Thread(target=end_engine, args=(state, timeout), kwargs={"at_once": self._at_once.is_set})
        ender.start()
        self._enders = [one for one in self._enders if one.is_alive()] + [ender]

    def _leave_slowly(self) -> None:
        """Say that this host drains, and wait until its engines run on other hosts, for the drain timeout at most."""
        until = self._monotonic() + self._drain_timeout
        while not self._at_once.is_set():
            self.tick()
            if not self._runs or self._monotonic() > until or not self._has_others():
                return
            self._at_once.wait(CHECK_SECONDS)

    def _has_others(self) -> bool:
        """Return whether another host could take this one's engines."""
        try:
            return any(one.host != self._own.host and not one.draining for one in self._hosts.all().hosts)
        except ServingError:
            return False

    def close(self) -> None:
        """End all engines, and leave the database."""
        self._over.set()
        self._finders.shutdown(wait=False, cancel_futures=True)
        self._supervisor.close()
        for engine in list(self._runs):
            self._end(engine)
        for ender in self._enders:
            ender.join()
        if self._adapters is not None:
            self._adapters.close()
        if self._journals is not None:
            self._journals.close()
        try:
            self._hosts.leave(self._own)
        except ServingError as error:  # the leader notices the silence
            logger.warning("the database: %s", error)
        self._say("stopped")


def reachable(listen: str) -> tuple[str, int]:
    """Return host and port of an address by which gateways on other hosts reach this one. Raises ``PackagingError``."""
    found = re.fullmatch(r"tcp://(.+):(\d+)", check_address(listen))
    assert found is not None, "just checked"
    if found[1] in WILDCARDS:
        raise PackagingError(f"--listen {listen}: gateways connect to it; name this host's address, not {found[1]}")
    return found[1], int(found[2])


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host.strip("[]"), port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return True
    except OSError:
        return False


def _size(spec: EngineSpec) -> int:
    return estimated_size(ModelSource(uri="", bundle=spec.bundle, engine=spec.settings))
