"""A schedule: hosts, processes, requests and faults, all drawn from one seed."""

from __future__ import annotations

import contextlib
import logging
import shutil
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import msgspec
from greenlet import GreenletExit
from msgspec import Struct

from ...interface.errors import Unavailable
from ...metering.accounts.limits import Bound, Limits
from ...metering.ledger.lease import Bucket
from ...metering.ledger.offline_settlement import settle_ended
from ...system.journal import Journal
from .database import Database
from .gateway import Engine, Gateway, Request, drawn_reservation
from .hosts import Host, Process
from .invariants import Invariants, Violation, require
from .machine import Machine, simulated
from .scheduler import Endless, Killed, Scheduler

START = 1_800_000_000.0
ROUND_SECONDS = 61.0
"""A round of upkeep when all has healed: longer than whatever is waited for until a process counts as ended."""
ROUNDS = 4
MAX_EVENTS = 15
LIMITS = (
    ("tenant", "acme", "otpm", (20, 120)),
    ("tenant", "acme", "qpm", (2, 8)),
    ("tenant", "acme", "budget_day", (200, 2000)),
    ("tenant", "initech", "in_flight", (1, 3)),
    ("key", "key_0", "itpm", (40, 200)),
    ("key", "key_1", "in_flight", (1, 3)),
    ("endpoint", "chat", "in_flight", (2, 6)),
    ("endpoint", "chat", "budget", (500, 5000)),
    ("user", "chat", "qph", (2, 6)),
)


class Outcome(Struct, frozen=True, kw_only=True):
    """The outcome of a schedule: how many steps it had, what it was made of, and what was broken ("" if nothing)."""

    seed: int
    steps: int
    events: tuple[str, ...]
    failure: str = ""
    requests: int = 0
    admitted: int = 0


class Schedule:
    """One schedule over ``database``, with the hosts' files below ``root``."""

    def __init__(self, seed: int, database: Database, root: Path, trace: Callable[[str], object] | None = None) -> None:
        self.seed = seed
        self.draw = Random(seed)
        self.scheduler = Scheduler(self.draw, START + self.draw.randrange(100_000))
        self.scheduler.trace = trace
        self.trace = trace
        self.machine = Machine(self.scheduler)
        self.database = database
        self.events: list[str] = []
        self.requests: dict[str, Request] = {}
        self.invariants = Invariants(database, self.requests)
        self.hosts: list[Host] = []
        self.processes: list[Process] = []
        self._root = root / "hosts"
        self._pid = 100
        self._errors = _Errors()
        self._bucket: Bucket | None = None
        self._is_busy = False
        """Whether it has callers with slices of limits."""
        self._limit_scale = 1
        self._can_repeat = False
        self._kinds = self._drawn_kinds()

    def run(self) -> Outcome:
        failure = ""
        self.database.begin(self.machine, has_clock=self.draw.random() < 0.7)
        self._is_busy = self.database.has_clock and self.draw.random() < 0.7
        watched = logging.getLogger(__package__.partition(".testing")[0])
        level, propagates = watched.level, watched.propagate
        watched.addHandler(self._errors)
        watched.setLevel(logging.ERROR)
        watched.propagate = False
        try:
            with simulated(self.machine, lends_freely=self._is_busy):
                try:
                    self._prepare()
                    self._disturb()
                    self._heal()
                except (Violation, Endless) as error:
                    failure = str(error)
                except BaseException as error:
                    failure = "".join(traceback.format_exception(error))
                finally:
                    for process in self.processes:
                        if process.is_alive:
                            process.kill()
                    self.scheduler.dispose()
        finally:
            watched.removeHandler(self._errors)
            watched.setLevel(level)
            watched.propagate = propagates
            shutil.rmtree(self._root, ignore_errors=True)
        admitted = sum(request.outcome == "admitted" for request in self.requests.values())
        return Outcome(
            seed=self.seed,
            steps=self.scheduler.steps,
            events=tuple(self.events),
            failure=failure,
            requests=len(self.requests),
            admitted=admitted,
        )

    # What a schedule is made of

    def _drawn_kinds(self) -> list[Callable[[], object]]:
        """Draw which kinds of events this schedule has: few kinds at a time reach further than all at once."""
        kinds: list[Callable[[], object]] = [
            self._kill,
            self._close,
            self._stop,
            self._kill_engine,
            self._kill_greenlet,
            self._lose_power,
            self._write_back,
            self._cut_off,
            self._take_database_away,
            self._fill_disk,
            self._break_disk,
            self._lie_about_disk,
            self._set_clock,
            self._pass_time,
            self._change_limit,
            self._settle_offline,
        ]
        return [kind for kind in kinds if self.draw.random() < 0.35]

    def _prepare(self) -> None:
        draw, faults = self.draw, self.database.faults
        for name in ("busy", "slow", "cut", "answer_lost", "commit_lost", "stuck"):
            if draw.random() < 0.3:
                setattr(faults, name, draw.choice((0.005, 0.02, 0.1)))
                self._can_repeat |= name in ("answer_lost", "stuck")
        if self._is_busy:
            self._limit_scale = draw.choice((4, 20, 100))
        elif draw.random() < 0.2:
            self._bucket = Bucket(rate=draw.randint(1, 10), prompt_weight_milli=draw.choice((100, 1000)))
        limits = Limits(self.database.store)
        for scope, subject, kind, (low, high) in LIMITS:
            if draw.random() < 0.15:
                limits.set(scope, subject, kind, self._bound(kind, low, high))
        for number in range(draw.choice((1, 2)) if self.database.has_clock else 1):
            host = Host(f"host{number}", self._root / f"host{number}", self.scheduler)
            if self.database.has_clock:
                host.wall_ahead = draw.uniform(-20.0, 20.0)
            self.hosts.append(host)
            for _ in range(draw.choice((1, 2))):
                self._start_gateway(host)

    def _bound(self, kind: str, low: int, high: int) -> Bound:
        soft = kind != "in_flight" and self.draw.random() < 0.25
        return Bound(value=self.draw.randint(low, high) * self._limit_scale, soft=soft)

    def _disturb(self) -> None:
        """Send the requests, and let what the seed says happen meanwhile."""
        draw = self.draw
        to_send, rate = draw.randint(*((6, 20) if self._is_busy else (1, 8))), draw.choice((0.01, 0.03, 0.08))
        density = draw.choice((0.006, 0.02)) if self._is_busy else 0.02
        while to_send or self.scheduler.running("request"):
            if to_send and draw.random() < density and self._send():
                to_send -= 1
            if self._kinds and len(self.events) < MAX_EVENTS and draw.random() < rate:
                kind = draw.choice(self._kinds)
                self._tell(kind.__name__)
                kind()
            if not self.scheduler.step():
                if not self._gateways():
                    self._start_gateway(draw.choice(self.hosts))
                elif to_send and self._send():
                    to_send -= 1
            self._check()

    def _heal(self) -> None:
        """End every fault, and let one process of each host do its upkeep until all must be settled."""
        self.database.faults.stop()
        self.database.away_until = 0.0
        for host in self.hosts:
            host.cut_until = 0.0
            host.wall_ahead = 0.0
            host.disk.is_full, host.disk.fails, host.disk.lies = False, 0.0, False
        for process in self.processes:
            process.stopped_until = 0.0
            if isinstance(process.program, _EngineProgram) and process.is_alive:
                process.kill()  # of requests whose gateway was killed, only an engine that has ended has counts
        for host in self.hosts:
            living = [one for one in self._gateways() if one.process.host is host and not one.is_closing]
            for gateway in living[1:]:
                self._end(gateway)
            if not living:
                self._start_gateway(host)
        until = self.scheduler.now + ROUND_SECONDS * ROUNDS
        for gateway in self._gateways():
            gateway.upkeep_seconds = ROUND_SECONDS
        while self.scheduler.step(until):
            self._check()
        for gateway in self._gateways():
            require(gateway.ledger is not None, f"{gateway.process.name} does not start")
        require(not self.scheduler.running("request"), "a request waits for ever")
        self._return_slices()
        faults = {"kill_greenlet", "take_database_away", "cut_off"} & set(self.events)
        self.invariants.at_end(can_repeat=bool(faults) or self._can_repeat)

    def _return_slices(self) -> None:
        """End in order what lives, after a request for each window of which something is still lent to the dead."""
        living = {one.ledger.owner for one in self._gateways() if one.ledger is not None}
        asking = self._gateways()[0]
        probes = self.invariants.abandoned(living, self.scheduler.now)
        for key_id, tenant in probes:
            request_id = f"request-{len(self.requests)}"
            drawn = drawn_reservation(request_id, self.draw, None)
            reservation = msgspec.structs.replace(drawn, key_id=key_id, tenant=tenant)
            request = self.requests[request_id] = Request(request_id, asking.process.host, reservation)
            self._spawn(request_id, asking.process, partial(self._serve, asking, request))
        until = self.scheduler.now + 2 * ROUND_SECONDS
        while probes and self.scheduler.step(until):
            self._check()
        for gateway in self._gateways():
            self._end(gateway)
        while self.scheduler.running("close") and self.scheduler.step():
            self._check()

    def _check(self) -> None:
        self.invariants.after_step()
        if self._errors.found:
            raise Violation(self._errors.found[0])

    def _tell(self, event: str) -> None:
        self.events.append(event.strip("_"))
        if self.trace:
            self.trace(f"{self.scheduler.now:.3f} --- {event.strip('_')}")

    # Processes

    def _process(self, kind: str, host: Host) -> Process:
        self._pid += 1
        process = Process(f"{kind}{self._pid}@{host.name}", host, self._pid)
        self.processes.append(process)
        return process

    def _gateways(self) -> list[Gateway]:
        programs = (process.program for process in self.processes if process.is_alive)
        return [program for program in programs if isinstance(program, Gateway)]

    def _start_gateway(self, host: Host) -> None:
        process = self._process("gateway", host)
        gateway = Gateway(process, self.database.lend(process), self.scheduler)
        process.program = gateway
        self._spawn("upkeep", process, gateway.run)

    def _spawn(self, name: str, process: Process, work: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                work()
            except (Killed, GreenletExit):
                raise
            except BaseException as error:
                self._errors.found.append(f"{name} of {process.name}: {''.join(traceback.format_exception(error))}")

        self.scheduler.spawn(f"{name} {process.name}", process, guarded)

    def _send(self) -> bool:
        """Send a request to a gateway that has started; return False if there is none."""
        ready = [one for one in self._gateways() if one.ledger is not None and not one.is_closing]
        if not ready:
            return False
        gateway = self.draw.choice(ready)
        host = gateway.process.host
        request_id = f"request-{len(self.requests)}"
        reservation = drawn_reservation(request_id, self.draw, self._bucket)
        if self._is_busy and self.draw.random() < 0.85:
            reservation = msgspec.structs.replace(reservation, key_id="key_0", tenant="acme")
        request = Request(request_id, host, reservation)
        request.in_memory, request.unsynced = bool(host.disk.is_full or host.disk.fails), host.disk.lies
        self.requests[request_id] = request
        work = partial(self._serve, gateway, request)
        self._spawn(request_id, gateway.process, work)
        return True

    def _serve(self, gateway: Gateway, request: Request) -> None:
        gateway.serve(request, self._engine(gateway), self.draw)

    def _engine(self, gateway: Gateway) -> Engine:
        """Return the host's engine, which a worker finds running or starts."""
        host = gateway.process.host
        for process in self.processes:
            if process.is_alive and process.host is host and isinstance(process.program, _EngineProgram):
                return process.program.engine
        process = self._process("engine", host)
        actor = self.scheduler.current
        assert actor is not None
        assert gateway.ledger is not None
        caller, actor.process, actor.is_quiet = actor.process, process, True
        try:
            journal = Journal(gateway.ledger.journal_dir, f"engine-{process.pid}")
        finally:
            actor.process, actor.is_quiet = caller, False
        engine = Engine(process, self.scheduler, journal)
        process.program = _EngineProgram(engine, partial(self._engine, gateway))
        return engine

    def _end(self, gateway: Gateway) -> None:
        gateway.is_closing = True

        def close() -> None:
            gateway.close()
            gateway.process.kill()

        self._spawn("close", gateway.process, close)

    # Events

    def _kill(self) -> None:
        if gateways := self._gateways():
            process = self.draw.choice(gateways).process
            process.kill()
            if self.draw.random() < 0.7:
                self._start_gateway(process.host)

    def _close(self) -> None:
        gateways = [one for one in self._gateways() if one.ledger is not None and not one.is_closing]
        if gateways:
            gateway = self.draw.choice(gateways)
            self._end(gateway)
            self._start_gateway(gateway.process.host)

    def _stop(self) -> None:
        """Stop a process for a while, as SIGSTOP does, or a debugger."""
        if gateways := self._gateways():
            self.draw.choice(gateways).process.stopped_until = self.scheduler.now + self.draw.uniform(1.0, 150.0)

    def _kill_engine(self) -> None:
        engines = [one for one in self.processes if one.is_alive and isinstance(one.program, _EngineProgram)]
        if engines:
            self.draw.choice(engines).kill()

    def _kill_greenlet(self) -> None:
        actors = [
            one for one in self.scheduler.interruptible() if one.name.startswith("request") and "/" not in one.name
        ]
        if actors:
            self.draw.choice(actors).thrown = GreenletExit

    def _lose_power(self) -> None:
        host = self.draw.choice(self.hosts)
        for process in self.processes:
            if process.host is host and process.is_alive:
                process.kill()
        host.lose_power()
        for request in self.requests.values():
            request.power_lost |= request.host is host
        self._start_gateway(host)

    def _write_back(self) -> None:
        """Let the kernel write some files of a host to its disk."""
        host = self.draw.choice(self.hosts)
        for path in sorted(host.disk.root.rglob("*")):
            if self.draw.random() < 0.5:
                host.disk.sync(path)

    def _cut_off(self) -> None:
        self.draw.choice(self.hosts).cut_until = self.scheduler.now + self.draw.choice((0.5, 3.0, 20.0, 90.0))

    def _take_database_away(self) -> None:
        self.database.away_until = self.scheduler.now + self.draw.choice((0.5, 3.0, 20.0, 70.0))

    def _fill_disk(self) -> None:
        host = self.draw.choice(self.hosts)
        host.disk.is_full = not host.disk.is_full
        self._note_bad_disk(host)

    def _break_disk(self) -> None:
        host = self.draw.choice(self.hosts)
        host.disk.fails = 0.0 if host.disk.fails else 0.5
        self._note_bad_disk(host)

    def _lie_about_disk(self) -> None:
        host = self.draw.choice(self.hosts)
        host.disk.lies = not host.disk.lies
        for request in self.requests.values():
            request.unsynced |= request.host is host

    def _note_bad_disk(self, host: Host) -> None:
        for request in self.requests.values():
            request.in_memory |= request.host is host

    def _set_clock(self) -> None:
        host = self.draw.choice(self.hosts)
        host.wall_ahead = self.draw.choice((0.0, 5.0, -5.0, 50.0, -50.0, 3600.0, -3600.0))

    def _pass_time(self) -> None:
        self.scheduler.now += self.draw.choice((1.0, 10.0, 61.0))

    def _change_limit(self) -> None:
        scope, subject, kind, (low, high) = self.draw.choice(LIMITS)
        value = self._bound(kind, low, high)
        removes = self.draw.random() < 0.3
        process = self._process("operator", self.draw.choice(self.hosts))
        limits = Limits(self.database.lend(process))

        def work() -> None:
            with contextlib.suppress(Unavailable):
                if removes:
                    limits.remove(scope, subject, kind)
                else:
                    limits.set(scope, subject, kind, value)
            process.kill()

        self._spawn("limit", process, work)

    def _settle_offline(self) -> None:
        host = self.draw.choice(self.hosts)
        process = self._process("settle", host)
        store = self.database.lend(process)

        def work() -> None:
            with contextlib.suppress(Unavailable):
                settle_ended(store, host.state, wait=self.scheduler.sleep)
            process.kill()

        self._spawn("settle", process, work)


class _EngineProgram:
    """An engine process's program; called, it returns the engine that took its place."""

    def __init__(self, engine: Engine, again: Callable[[], Engine]) -> None:
        self.engine = engine
        self._again = again

    def __call__(self) -> Engine:
        return self._again()


class _Errors(logging.Handler):
    """The errors that the product logs with a traceback: it did not expect them."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            told = "".join(traceback.format_exception(record.exc_info[1]))
            self.found.append(f"{record.getMessage()}: {told}")
