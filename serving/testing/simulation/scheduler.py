"""Actors that take turns as a seed says, in a time that passes only when all of them wait.

An actor is a greenlet that runs the product's code. It hands over at each seam: before and after an operation that
another process could see (a statement, a commit, a write), in a sleep, and at a lock that another actor holds. Between
two seams nothing else runs, so that a seed always gives the same schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from greenlet import getcurrent, greenlet

MAX_STEPS = 200_000


class Process(Protocol):
    """The process of an actor: whether it lives, and until when it is stopped."""

    @property
    def is_alive(self) -> bool: ...
    @property
    def stopped_until(self) -> float: ...


class Killed(BaseException):
    """The end of an actor whose process was killed: no seam of a dead process returns."""


class Endless(AssertionError):
    """The failure that a schedule does not come to its end: something waits for ever."""


class Actor:
    """A greenlet of a simulated process. ``error`` is what it ended with."""

    def __init__(self, name: str, process: Process, run: Callable[[], object], hub: greenlet) -> None:
        self.name = name
        self.process = process
        self.is_quiet = False
        self.is_waiting = False
        self.is_interruptible = False
        self.wakes_at = 0.0
        self.is_ready: Callable[[], bool] | None = None
        self.thrown: type[BaseException] | None = None
        self.error: BaseException | None = None
        self.result: Any = None
        self.is_done = False
        self._run = run
        self.greenlet = greenlet(self._work, hub)

    def _work(self) -> None:
        self.is_waiting = False
        try:
            self.result = self._run()
        except BaseException as error:
            self.error = error
        finally:
            self.is_done = True


class Scheduler:
    """The turns of all actors, and the time. ``now`` is the true time in seconds since the epoch."""

    def __init__(self, draw: Random, start: float) -> None:
        self.draw = draw
        self.now = start
        self.steps = 0
        self.trace: Callable[[str], object] | None = None
        self._hub = getcurrent()
        self._actors: list[Actor] = []
        self._by_greenlet: dict[greenlet, Actor] = {}

    @property
    def current(self) -> Actor | None:
        return self._by_greenlet.get(getcurrent())

    def spawn(self, name: str, process: Process, run: Callable[[], object]) -> Actor:
        actor = Actor(name, process, run, self._hub)
        self._actors.append(actor)
        self._by_greenlet[actor.greenlet] = actor
        return actor

    def pause(self) -> None:
        """Hand over at a seam. Raises ``Killed`` in a dead process."""
        actor = self.current
        if actor is None:
            return
        if not actor.process.is_alive:
            raise Killed
        if not actor.is_quiet:
            self._hand_over(actor)

    def sleep(self, seconds: float) -> None:
        self.wait(None, seconds)

    def wait(
        self, is_ready: Callable[[], bool] | None, seconds: float | None = None, *, interruptible: bool = True
    ) -> bool:
        """Wait until ``is_ready``, or until ``seconds`` have passed; return whether it is ready.

        A greenlet can be killed here, and only here.
        """
        actor = self.current
        if actor is None:
            self.now += seconds or 0.0
            return is_ready is None or is_ready()
        if not actor.process.is_alive:
            raise Killed
        actor.is_ready = is_ready
        actor.wakes_at = float("inf") if seconds is None else self.now + seconds
        actor.is_waiting, actor.is_interruptible = True, interruptible
        self._hand_over(actor)
        actor.is_waiting, actor.is_interruptible, actor.is_ready = False, False, None
        if actor.thrown is not None:
            thrown, actor.thrown = actor.thrown, None
            raise thrown
        return is_ready is None or is_ready()

    def _hand_over(self, actor: Actor) -> None:
        self._hub.switch()
        if not actor.process.is_alive:
            raise Killed

    def step(self, until: float = float("inf")) -> bool:
        """Run one actor up to its next seam; return False if none can run before ``until``."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Endless(f"{MAX_STEPS} steps: {[actor.name for actor in self._actors]}")
        ready = [actor for actor in self._actors if self._can_run(actor)]
        if not ready:
            at = min((self._runs_at(actor) for actor in self._actors), default=float("inf"))
            if at > until or at == float("inf"):
                return False
            self.now = max(self.now, at)
            ready = [actor for actor in self._actors if self._can_run(actor)]
            if not ready:
                return False
        actor = self.draw.choice(ready)
        self.now += self.draw.random() * 0.002
        if self.trace:
            self.trace(f"{self.now:.3f} {actor.name}")
        actor.greenlet.switch()
        if actor.is_done:
            self._actors.remove(actor)
            del self._by_greenlet[actor.greenlet]
        return True

    def _can_run(self, actor: Actor) -> bool:
        process = actor.process
        if not process.is_alive or process.stopped_until > self.now:
            return False
        if not actor.is_waiting or actor.thrown is not None or actor.wakes_at <= self.now:
            return True
        return actor.is_ready is not None and actor.is_ready()

    def _runs_at(self, actor: Actor) -> float:
        if not actor.process.is_alive:
            return float("inf")
        waits = actor.wakes_at if actor.is_waiting and actor.thrown is None else self.now
        if actor.is_waiting and actor.is_ready is not None and actor.is_ready():
            waits = self.now
        return max(waits, actor.process.stopped_until)

    def interruptible(self) -> list[Actor]:
        """Return the actors that a greenlet's kill would reach now."""
        return [actor for actor in self._actors if actor.is_interruptible and actor.process.is_alive]

    def running(self, prefix: str) -> list[Actor]:
        return [actor for actor in self._actors if actor.name.startswith(prefix) and actor.process.is_alive]

    def dispose(self) -> None:
        """End the actors that are left; their processes are dead, so that every seam raises ``Killed``."""
        for actor in self._actors:
            assert not actor.process.is_alive
            if actor.greenlet:  # it has begun
                actor.greenlet.throw(Killed)
        self._actors.clear()
        self._by_greenlet.clear()


class Lock:
    """A lock for actors. Taken from outside of them, it must be free."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held = False

    def acquire(self, blocking: bool = True) -> bool:
        actor = self._scheduler.current
        if actor is not None and not actor.process.is_alive:
            raise Killed
        if self._held and not blocking:
            return False
        while self._held:
            self._scheduler.wait(lambda: not self._held, interruptible=False)
        self._held = True
        return True

    def release(self) -> None:
        self._held = False

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Event:
    """An event for actors. Waited for outside of them, it must be set."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, or for ``timeout`` seconds; return whether it is set."""
        if self._is_set:
            return True
        return self._scheduler.wait(self.is_set, timeout)
