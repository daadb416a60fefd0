"""Builds the application in a worker process: engine clients, tokenizers, store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flask import Flask

from ..modes import PayPerToken
from ..tasks.endpoint import DATABRICKS_PAY_PER_TOKEN, DATABRICKS_PROVISIONED, EndpointView, Profile
from ..tasks.text import TextModel
from ..transport.client_gevent import attach
from ..transport.launch import Launcher
from . import logs
from .app import create_app, make_server
from .endpoints import Endpoint, Endpoints
from .settings import default_state_dir
from .spec import EndpointSpec, ProfileName, ServeSpec, connect_options
from .warm import generate_one

PROFILES: dict[ProfileName, Profile] = {
    "open": Profile(),
    "databricks-provisioned": DATABRICKS_PROVISIONED,
    "databricks-pay-per-token": DATABRICKS_PAY_PER_TOKEN,
}


def build(spec: ServeSpec) -> Flask:
    """The application of one worker, its engines proven to give tokens."""
    logs.configure(spec.settings.log_level)
    keys, ledger = _metering(spec)
    mode = PayPerToken(ledger) if ledger is not None else None
    journal = str(ledger.journal_dir) if ledger is not None else ""
    endpoints = Endpoints(*(_endpoint(spec, endpoint, mode, journal) for endpoint in spec.endpoints))
    for endpoint in endpoints:
        generate_one(endpoint.engine)
    if ledger is not None:
        ledger.start()  # here we are after the fork
    keys = keys if spec.settings.require_keys else None
    return create_app(make_server(endpoints, spec.settings, keys=keys, ledger=ledger))


def _endpoint(spec: ServeSpec, endpoint: EndpointSpec, mode: Any, journal: str) -> Endpoint:
    # where the keeper's engine is: the same bundle, settings and options name the same directory
    address = Launcher(endpoint.bundle, endpoint.engine, **connect_options(spec, endpoint)).state.path
    engine = attach(address, stall_timeout=endpoint.engine.stall_timeout, journal=journal)
    view = EndpointView(
        name=endpoint.name,
        info=engine.info,
        text=TextModel(endpoint.bundle, endpoint.engine.trust_remote_code),
        adapters=lambda: tuple(adapter.name for adapter in engine.adapters()),
        profile=PROFILES[endpoint.profile],
        names=(endpoint.entity,),
    )
    return Endpoint(
        name=endpoint.name, entity=endpoint.entity, view=view, engine=engine, mode=mode, created=endpoint.created
    )


def _metering(spec: ServeSpec) -> tuple[Any, Any]:
    """Keys and ledger of the store, where the server has one."""
    if spec.settings.database is None:
        return None, None
    from ..metering.keys import Keys
    from ..metering.ledger import Ledger
    from ..metering.store import Store
    from .store_threads import StoreThreads

    store = Store(spec.settings.database, run=StoreThreads.for_url(spec.settings.database))
    state = Path(spec.settings.state_dir or default_state_dir(), "ledger")
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Keys(store), Ledger(store, state_dir=state)
