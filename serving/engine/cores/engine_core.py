"""The common part of the engine's cores: requests come in, have deadlines, and leave; adapters; health."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Self

from ...interface.bundle import Bundle
from ...interface.engine import AdapterInfo, Client, EngineInfo, EngineOutput, Health
from ...interface.errors import AlreadyExists, InternalError, ServingError, ShuttingDown
from ...interface.request import POOLED, ValidRequest
from ...interface.settings import EngineSettings
from ...interface.validated_struct import Checked
from ..adapters.registry import pinned_adapters
from ..adapters.request_adapters import RequestAdapters
from ..devices import openmp
from ..devices.cpu_contention import Contention
from ..native import library
from ..requests.request_check import check_request
from ..scheduling.inflight import InflightRequest, InflightRequests


class EngineCore:
    """The parts of ``Core`` except for what a step computes. ``EngineCore(bundle, settings)`` makes a subclass, the
    core of the model's tasks. Not thread-safe: the thread that makes it must drive it (torch ties its threads to
    it). Its ``parts``, ``request_adapters`` and the like are public for tests and measurements, which only read
    them."""

    backend: ClassVar[str] = "native"
    _by_pooled: ClassVar[dict[bool, type[EngineCore]]] = {}

    def __init_subclass__(cls, *, pooled: bool) -> None:
        """Register a core. ``pooled``: whether it computes the tasks in ``POOLED``, or all others."""
        super().__init_subclass__()
        cls._by_pooled[pooled] = cls

    def __new__(cls, bundle: Bundle, settings: EngineSettings) -> Self:
        """Choose the core by the model's tasks, unless it is called by its own name."""
        chosen: Any = cls._by_pooled[bool(POOLED.intersection(bundle.tasks))] if cls is EngineCore else cls
        made: Self = super().__new__(chosen)
        return made

    def __init__(self, bundle: Bundle, settings: EngineSettings) -> None:
        """Load the model. Raises ``PackagingError`` if it cannot run as the settings ask."""
        settings.of_backend(self.backend, Checked)
        self.settings = settings
        self.info, self.request_adapters = self._load(bundle, pinned_adapters(settings, bundle))
        self.inflight = InflightRequests(self._ended)
        self._steps = 0
        self._last_step = time.monotonic()
        self._closed = False
        self._contention = Contention(self._wait_on_cpus)
        self._wait_on_cpus(False)
        for name, path in bundle.adapters.items():
            self.load_adapter(name, path)

    def _load(self, bundle: Bundle, pinned: Collection[str]) -> tuple[EngineInfo, RequestAdapters]:
        """Load the model and make what its adapters are kept in, where those named in ``pinned`` are never evicted."""
        raise NotImplementedError

    # -- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: ValidRequest, client: Client = None, *, continues: bool = False) -> None:
        """Accept a request. Nothing is raised: an invalid request gets a ``Failed`` from the next step.

        ``max_queued_requests`` limits new requests only. A request that ``continues`` was admitted before, and its
        caller may already have half of its text.
        """
        try:
            self._check(request, continues)
            self._accept(request, client)
        except ServingError as error:
            self.inflight.refuse(request, client, error)

    def _check(self, request: ValidRequest, continues: bool) -> None:
        if request.request_id in self.inflight:
            raise AlreadyExists(f"request {request.request_id} is already running")
        if self._closed:
            raise ShuttingDown("the engine is shutting down")
        if not continues:
            self.inflight.check_room(request, self.settings.max_queued_requests)
        check_request(request, self.info)

    def _accept(self, request: ValidRequest, client: Client) -> None:
        """Put a checked request in flight. Raises ``ServingError`` only while the request is not yet in flight."""
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """End a request early. Unknown or finished requests are ignored."""
        raise NotImplementedError

    def finish(self, request_id: str, index: int) -> None:
        """End one sequence, whose text is complete for its caller. The others go on."""
        raise NotImplementedError

    def _expire(self, inflight: InflightRequest) -> None:
        """End a request whose deadline has passed."""
        raise NotImplementedError

    def _fail(self, inflight: InflightRequest, error: ServingError) -> None:
        """Fail a request and release all that it has in the engine."""
        raise NotImplementedError

    def _ended(self, inflight: InflightRequest) -> None:
        """Note that a request has left the engine."""
        self.request_adapters.release(inflight.adapter)

    # -- steps ------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Return whether ``step`` has something to do or to return."""
        raise NotImplementedError

    @property
    def waits(self) -> bool:
        """Return whether a request waits for something that no step computes, even if there is no other work."""
        return False

    def on_work(self, wake: Callable[[], None]) -> None:
        """See ``Core.on_work``. Never called by a core whose requests wait for nothing."""
        return

    def step(self) -> list[EngineOutput]:
        """Make a little progress (one forward) and return what happened."""
        raise NotImplementedError

    def _expire_late(self) -> None:
        now = time.monotonic()
        for inflight in self.inflight:
            deadline = inflight.request.deadline
            if deadline is not None and now >= deadline:
                self._expire(inflight)

    # -- adapters ---------------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        return self.request_adapters.load(name, path, replace=replace, pinned=pinned)

    def unload_adapter(self, name: str, *, at_once: bool = False) -> None:
        self.request_adapters.unload(name, at_once=at_once)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return self.request_adapters.infos()

    # -- state ------------------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """Return what every core knows of its health."""
        self._contention.look()
        return Health(
            status="dead" if self._closed else "ready",
            steps=self._steps,
            last_step_age=time.monotonic() - self._last_step,
            cpu_wait=round(self._contention.waiting, 3),
        )

    def _wait_on_cpus(self, oversubscribed: bool) -> None:
        """Set how threads wait. torch's threads spin only if they have the CPUs to themselves: not if others run
        there, and not beside our own kernels' threads, which spin between two steps if nothing else wants to run."""
        library.share_cpus(oversubscribed)
        openmp.waiting.set_brief(oversubscribed or self.info.kernels == "native")

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` if memory or sequences are unaccounted for."""
        self.request_adapters.check_integrity(inflight.adapter for inflight in self.inflight)

    def close(self) -> list[EngineOutput]:
        """End every request with ``Failed("shutting_down")``, free the memory and return the last events."""
        if not self._closed:
            self._closed = True
            for inflight in self.inflight:
                self._fail(inflight, ShuttingDown("the engine is shutting down"))
            self._free()
        return self.inflight.drain()

    def _free(self) -> None:
        """Free the memory and end the threads."""
        return


def model_failure(error: Exception) -> InternalError:
    """Return the error that a caller gets for an exception of the model, without its text."""
    return InternalError(f"the model could not run this request ({type(error).__name__})")
