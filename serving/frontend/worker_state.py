"""The objects that all requests of one worker share, built once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gevent.event import Event

from ..control.settings import ServerSettings
from ..endpoints.store import EndpointStore
from ..interface.errors import NotFound
from ..observability import tracing
from ..observability.tracing import Tracer
from ..routing.load_shedding import LoadShedder
from ..routing.model_aliases import ModelAliases
from ..routing.plan_follower import PlanFollower
from ..routing.served_endpoints import ServedEndpoints
from ..tasks.cache_salt import CacheSalts
from .background.shadow_queue import ShadowQueue
from .limits.memory_budget import MemoryBudget
from .limits.refusal_limit import RefusalLimit
from .offload import Offload
from .scorers import Scorers
from .streams.in_flight import InFlightRequests

if TYPE_CHECKING:
    from ..control.mlflow_processes.prompt_registry import PromptRegistry
    from ..control.mlflow_resolver import ResolvedModel
if TYPE_CHECKING:  # each imports a library that a server which does not use it must not load
    from ..metering.accounts.keys import Keys
    from ..metering.ledger.ledger import Ledger
    from .background.payload_queue import PayloadQueue
    from .jwt_tokens import Tokens


# Bytes of decoded images for each byte of a body: a photograph in JPEG has about ten times as many.
PIXEL_BYTES_PER_BYTE = 8
FindModels = Callable[[tuple[str, ...]], "tuple[ResolvedModel, ...]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """The objects that all requests of one worker share.

    If ``keys`` and ``tokens`` are both None, no key or token is required. Without a ``ledger`` nothing is metered.
    Without ``endpoint_store`` and ``follower`` (of the plan) the endpoints are not managed. ``runtime_dir`` has the
    engines' state directories; None means the user's own. ``find_models`` resolves URIs (``ResolverPool``).
    ``prompts`` is MLflow's prompt registry, if the server has one.
    ``payloads`` takes the texts of requests to endpoints with a payload log.
    ``shadows`` takes copies of requests, for ``ShadowRunner``. ``batches_changed`` wakes the runner of batches.
    """

    settings: ServerSettings
    endpoints: ServedEndpoints
    load_shedder: LoadShedder
    in_flight: InFlightRequests
    offload: Offload
    salts: CacheSalts
    memory: MemoryBudget
    pixels: MemoryBudget
    refusals: RefusalLimit
    keys: Keys | None = None
    tokens: Tokens | None = None
    ledger: Ledger | None = None
    tracer: Tracer = tracing.OFF
    endpoint_store: EndpointStore | None = None
    follower: PlanFollower | None = None
    runtime_dir: str | None = None
    find_models: FindModels | None = None
    prompts: PromptRegistry | None = None
    scorers: Scorers = field(default_factory=lambda: Scorers(""))
    payloads: PayloadQueue | None = None
    shadows: ShadowQueue = field(default_factory=ShadowQueue)
    batches_changed: Event = field(default_factory=Event)

    @property
    def requires_key(self) -> bool:
        """Whether a request without an API key or token is refused."""
        return self.keys is not None or self.tokens is not None

    def managed_endpoints(self) -> EndpointStore:
        """Return the store of endpoints. Raises ``NotFound`` if endpoints are not managed."""
        if self.endpoint_store is None:
            raise NotFound("this server has no store of endpoints")
        return self.endpoint_store


def make_load_shedder(settings: ServerSettings) -> LoadShedder:
    return LoadShedder(max_queued=settings.max_queued, retry_after=settings.retry_after, workers=settings.workers)


def make_server(
    endpoints: ServedEndpoints,
    settings: ServerSettings | None = None,
    *,
    load_shedder: LoadShedder | None = None,
    cache_secret: bytes | None = None,
) -> WorkerState:
    """Make what every server has, with ``settings``; ``dataclasses.replace`` adds what only some have.

    A server with a ``follower`` needs the follower's own ``load_shedder``. ``cache_secret`` (``CacheSalts``) must be
    the same in all workers.
    """
    settings = settings or ServerSettings()
    endpoints.aliases = ModelAliases(names=settings.model_aliases, default=settings.default_endpoint)
    return WorkerState(
        settings=settings,
        endpoints=endpoints,
        load_shedder=load_shedder or make_load_shedder(settings),
        in_flight=InFlightRequests(),
        offload=Offload(settings.offload_bytes),
        salts=CacheSalts(cache_secret),
        memory=MemoryBudget(
            total=max(settings.max_held_bytes, settings.max_body_bytes),
            by_caller=max(settings.max_caller_bytes, settings.max_body_bytes),
        ),
        pixels=MemoryBudget(
            total=PIXEL_BYTES_PER_BYTE * settings.max_held_bytes,
            by_caller=PIXEL_BYTES_PER_BYTE * settings.max_caller_bytes,
            what="images",
        ),
        refusals=RefusalLimit(settings.refusals_per_minute),
        scorers=Scorers(settings.guardrail_scorers),
    )
