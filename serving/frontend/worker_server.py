"""Build the objects that the requests of one process share: store, endpoints of the controller's plan, keys, ledger."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gevent

from ..control.mlflow_processes.prompt_registry import PromptRegistry, is_configured
from ..control.model_sources import locate
from ..control.plan import PlanDirectory
from ..control.resolver_pool import ResolverPool
from ..control.settings import ServerSettings, ledger_dir
from ..control.spec import ServeSpec, store_url
from ..endpoints.store import EndpointStore
from ..metering.store.outbox import EventOutbox
from ..observability.engine_counters import CounterDirectory
from ..observability.metrics import COUNT_VIOLATIONS, STORE_OUTAGES
from ..observability.metrics import DIRECTORY as METRICS
from ..observability.tracing import OFF, Outbox, Tracer
from ..routing.admission import profiles_of
from ..routing.plan_follower import PlanFollower
from ..routing.served_endpoints import ServedEndpoints
from ..system import logs
from ..transport.client.gevent_client import attach
from . import gevent_wait
from .worker_state import WorkerState, make_load_shedder, make_server

if TYPE_CHECKING:  # each imports a library that a server which does not use it must not load
    from ..metering.accounts.keys import Keys
    from ..metering.ledger.ledger import Ledger
    from ..metering.store.store import Store
    from .background.payload_queue import PayloadQueue
    from .jwt_tokens import Tokens


def worker_server(spec: ServeSpec, directory: Path, cache_secret: bytes | None = None) -> WorkerState:
    """Build the ``WorkerState`` of one process. ``directory`` and ``cache_secret`` are shared by the whole server.

    The controller process tests the engines before it puts them into the plan. The test is not repeated here:
    otherwise a worker that replaces a killed one could not answer anybody, not even ``/health``, while an engine is
    stalled or full.
    """
    logs.configure(spec.settings.log_level, spec.settings.log_file)
    gevent_wait.install()
    settings = spec.settings
    store = _store(store_url(spec, directory))
    keys, ledger = _metering(spec, store)
    endpoints, load_shedder = ServedEndpoints(), make_load_shedder(settings)
    plan_directory = PlanDirectory(directory)
    follower = PlanFollower(
        plan_directory,
        endpoints,
        load_shedder,
        open=_open_engines(settings, ledger),
        ledger=ledger,
        profile=spec.profile,
        profiles=profiles_of(settings),
        dialects=spec.dialects,
        engine_timeout=settings.engine_timeout,
        counter_directory=CounterDirectory(Path(os.environ[METRICS])) if METRICS in os.environ else None,
    )
    follower.adopt()
    if ledger is not None:
        ledger.start()  # must be after the fork, which it is here
    find = ResolverPool(directory, limit=settings.max_resolvers, timeout=settings.resolve_timeout)
    located = functools.partial(
        locate, overrides=spec.engine, metered=ledger is not None, has_hosts=settings.has_hosts, find=find
    )
    server = dataclasses.replace(
        make_server(endpoints, settings, load_shedder=load_shedder, cache_secret=cache_secret),
        keys=keys if settings.asks_who else None,
        tokens=_tokens(settings),
        ledger=ledger,
        tracer=_tracer(settings, directory),
        endpoint_store=EndpointStore(
            store,
            locate=located,
            changed=plan_directory.note_change,
            outbox=EventOutbox(store, settings.webhooks),
            placement=settings.engine_placement,
            scale=settings.engine_scale,
        ),
        follower=follower,
        runtime_dir=spec.runtime_dir,
        find_models=find,
        prompts=PromptRegistry() if is_configured() else None,
        payloads=None if ledger is None else _payloads(ledger),
    )
    gevent.spawn(follower.run)
    return server


def _open_engines(settings: ServerSettings, ledger: Ledger | None) -> Callable[..., Any]:
    """Return a function that attaches to engines; ``ledger`` reads what they write to the journal."""
    journal, store = (str(ledger.journal_dir), ledger.store_id) if ledger is not None else ("", "")
    return functools.partial(attach, journal=journal, store=store, timeout=settings.engine_timeout)


def _tokens(settings: ServerSettings) -> Tokens | None:
    """Return the verifier of bearer tokens, if the server accepts them."""
    if settings.jwt_jwks is None:
        return None
    from .jwks import KeySource
    from .jwt_tokens import Tokens

    return Tokens(settings, KeySource(settings.jwt_jwks))


def _payloads(ledger: Ledger) -> PayloadQueue:
    from ..metering.usage.payloads import Payloads
    from .background.payload_queue import PayloadQueue

    queue = PayloadQueue(Payloads(ledger.store), ledger.now_ms)
    queue.start()
    return queue


def _tracer(settings: ServerSettings, directory: Path) -> Tracer:
    if settings.trace_sample == 0:
        return OFF
    return Tracer(settings.trace_sample, content=settings.trace_content, send=Outbox(directory))


def _store(url: str) -> Store:
    from ..metering.store.store import Store
    from .background.store_threads import StoreThreads

    # patient: the controller has opened the store before, so if it does not answer now, it will later
    return Store(url, run=StoreThreads.for_url(url), patient=True)


def _metering(spec: ServeSpec, store: Store) -> tuple[Keys | None, Ledger | None]:
    """Return keys and ledger, if the server has its own database."""
    if spec.settings.database is None:
        return None, None
    from ..metering.accounts.keys import Keys
    from ..metering.ledger.ledger import Ledger

    ledger = Ledger(store, state_dir=ledger_dir(spec.settings), max_clock_skew=spec.settings.max_clock_skew)
    ledger.on_outage = STORE_OUTAGES.inc
    ledger.audit.on_violation = lambda rule: COUNT_VIOLATIONS.labels(rule).inc()
    return Keys(store), ledger
