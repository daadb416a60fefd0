"""Builds the application in a worker process: store, endpoints as the controller's plan has them, keys, ledger."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import gevent
from flask import Flask

from ... import logs
from ...control.model_sources import locate
from ...control.plan import PlanDirectory
from ...control.resolver_pool import ResolverPool
from ...control.settings import ServerSettings, ledger_dir
from ...control.spec import ServeSpec, store_url
from ...endpoints.store import EndpointStore
from ...observability.engine_counters import CounterDirectory
from ...observability.metrics import DIRECTORY as METRICS
from ...observability.metrics import STORE_OUTAGES
from ...observability.tracing import OFF, Outbox, Tracer
from ...routing.admission import profiles_of
from ...routing.plan_follower import PlanFollower
from ...routing.served_endpoints import ServedEndpoints
from ...supervision.warm_up import generate_one
from ...transport.client.gevent_client import attach
from .. import gevent_wait
from ..app import create_app, make_server
from ..offload import give_way


def build(spec: ServeSpec, directory: Path, cache_secret: bytes | None = None) -> Flask:
    """The application of one worker, its engines proven to give tokens. ``directory`` and ``cache_secret`` are the
    server's."""
    logs.configure(spec.settings.log_level)
    gevent_wait.install()
    store = _store(store_url(spec, directory))
    keys, ledger = _metering(spec, store)
    endpoints = ServedEndpoints()
    required = keys if spec.settings.asks_who else None
    server = make_server(endpoints, spec.settings, keys=required, ledger=ledger, cache_secret=cache_secret)
    server.tokens = _tokens(spec.settings)
    server.tracer = _tracer(spec.settings, directory)
    server.store = store
    settings = spec.settings
    find = ResolverPool(directory, limit=settings.max_resolvers, timeout=settings.resolve_timeout)
    located = functools.partial(locate, overrides=spec.engine, metered=ledger is not None, find=find)
    server.management = EndpointStore(store, locate=located)
    journal = str(ledger.journal_dir) if ledger is not None else ""
    opened = functools.partial(attach, journal=journal, timeout=spec.settings.engine_timeout)
    follower = PlanFollower(
        PlanDirectory(directory),
        endpoints,
        server.load_shedder,
        open=opened,
        ledger=ledger,
        profile=spec.profile,
        profiles=profiles_of(spec.settings),
        engine_timeout=spec.settings.engine_timeout,
        counter_directory=CounterDirectory(Path(os.environ[METRICS])) if METRICS in os.environ else None,
    )
    follower.adopt()
    for endpoint in endpoints.entities():
        if endpoint.engine.num_replicas:
            generate_one(endpoint.engine)
    if ledger is not None:
        ledger.start()  # here we are after the fork
    server.follower, server.runtime_dir = follower, spec.runtime_dir
    gevent.spawn(follower.run)
    app = create_app(server)
    give_way()
    return app


def _tokens(settings: ServerSettings) -> Any:
    """What checks bearer tokens, where the server takes them."""
    if settings.jwt_jwks is None:
        return None
    from ..jwks import KeySource
    from ..jwt_tokens import Tokens

    return Tokens(settings, KeySource(settings.jwt_jwks))


def _tracer(settings: ServerSettings, directory: Path) -> Tracer:
    if settings.trace_sample == 0:
        return OFF
    return Tracer(settings.trace_sample, content=settings.trace_content, send=Outbox(directory))


def _store(url: str) -> Any:
    from ...metering.store import Store
    from ..store_threads import StoreThreads

    # the controller has opened it: what does not answer now will
    return Store(url, run=StoreThreads.for_url(url), patient=True)


def _metering(spec: ServeSpec, store: Any) -> tuple[Any, Any]:
    """Keys and ledger, where the server has a database of its own."""
    if spec.settings.database is None:
        return None, None
    from ...metering.keys import Keys
    from ...metering.ledger import Ledger

    ledger = Ledger(store, state_dir=ledger_dir(spec.settings))
    ledger.on_outage = STORE_OUTAGES.inc
    return Keys(store), ledger
