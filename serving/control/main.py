"""The controller process: it follows the endpoints' store, keeps a server's engines running and publishes the plan.

``python -m mlflow_llm.serving.control.main DIRECTORY`` reads ``DIRECTORY/spec.json``. It writes one JSON line of
progress for each step to standard output, and ``{"stage": "ready"}`` once every endpoint has generated a token. It ends
when its standard input is closed, which the server keeps open as long as it lives. If it is killed and started again,
it finds its engines still running and continues.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from ..endpoints.config import EntityConfig, ModelSource
from ..endpoints.store import EndpointStore
from ..interface.errors import PackagingError, ServingError
from ..metering.accounts.budget_alerts import BudgetAlerts
from ..metering.accounts.keys import Keys
from ..metering.ledger.store_clock import StoreClock
from ..metering.store.checks import NoStore
from ..metering.store.identity import ensure_identity
from ..metering.store.outbox import EventOutbox
from ..metering.store.store import Store
from ..supervision.supervisor import Supervisor
from ..supervision.warm_up import generate_one
from ..system import child, logs
from .autoscaler import Autoscaler
from .engine_memory import EngineMemory
from .fleet import Fleet
from .following.counts import CanaryCounts
from .following.follower import AliasFollower
from .hosts.journals import JournalReader, read_engines
from .model_sources import config_of, locate, with_files
from .plan import PlanDirectory
from .ray_runtime.runtime import RayRuntime, launch_of
from .reconciler import TICK_SECONDS, Reconciler
from .resolver_pool import ResolverPool
from .settings import gateway_name, ledger_dir
from .spec import ServeSpec, store_url
from .webhooks import WebhookSender, read_secret

logger = logging.getLogger(__name__)
SPEC = "spec.json"
METRICS = "PROMETHEUS_MULTIPROC_DIR"  # set by the server; the workers count in files of this directory
ORPHANED_SECONDS = 120.0  # for the workers' last replies, when the server was killed


def say(stage: str, **fields: object) -> None:
    """Write a line of progress to standard output, for the server."""
    with contextlib.suppress(BrokenPipeError):
        # unbuffered: otherwise the interpreter complains at exit about output that a dead server never read
        os.write(sys.stdout.fileno(), json.dumps({"stage": stage, **fields}).encode() + b"\n")


def main(argv: list[str]) -> int:
    """Run until standard input closes, and return the exit status, 1 if the start failed."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # they may go to all processes, but the server decides when we end
        signal.signal(ignored, signal.SIG_IGN)
    directory = Path(argv[0])
    spec = msgspec.json.decode((directory / SPEC).read_bytes(), type=ServeSpec)
    logs.take_over("warning", spec.settings.log_file)
    over, orphaned, changed = threading.Event(), threading.Event(), threading.Event()
    threading.Thread(target=_watch_stdin, args=(over, orphaned, changed), daemon=True).start()
    try:
        store = Store(store_url(spec, directory))
        if spec.settings.database is not None:
            StoreClock(store, spec.settings.max_clock_skew).check()
        if spec.settings.database is not None and not spec.settings.asks_who:
            _warn_of_keys(Keys(store))
        secret = read_secret(spec.settings)
    except (NoStore, PackagingError, ServingError) as error:
        say("failed", message=str(error))
        return 1
    plan_directory = PlanDirectory(directory)
    metered = spec.settings.database is not None
    supervisor = Supervisor(
        state_dir=spec.runtime_dir,
        probe=generate_one,
        changed=changed.set,
        in_use=plan_directory.in_use,
        store=ensure_identity(store).store_id if metered else "",
    )
    journals = JournalReader(lambda: read_engines(store, supervisor.named_elsewhere()))
    outbox = EventOutbox(store, spec.settings.webhooks)
    endpoints = EndpointStore(store, locate=_locate_nothing, outbox=outbox)
    resolver_pool = ResolverPool(directory, limit=spec.settings.max_resolvers, timeout=spec.settings.resolve_timeout)
    found = functools.partial(with_files, find=resolver_pool, key_file=spec.settings.engine_key_file)
    autoscaler = Autoscaler.of(spec.settings, store)
    memory = EngineMemory(spec.settings.engine_memory_budget, known=plan_directory.engines().engines)
    fleet = Fleet(
        endpoints, name=gateway_name(spec.settings), gateway=plan_directory.gateway(), place=_gateway_place(spec)
    )
    follower = AliasFollower(
        endpoints,
        locate=functools.partial(locate, overrides=spec.engine, metered=metered, find=resolver_pool),
        poll=spec.settings.alias_poll,
    )
    reconciler = Reconciler(
        endpoints,
        supervisor,
        plan_directory,
        autoscaler,
        find=found,
        memory=memory,
        fleet=fleet,
        follower=follower,
        webhooks=None if secret is None else WebhookSender(outbox, secret),
        budget_alerts=BudgetAlerts(store, outbox, spec.settings.alert_shares),
        ray_runtime=_ray_runtime(spec, store, endpoints),
        canary_counts=CanaryCounts(Path(os.environ[METRICS]) if METRICS in os.environ else None),
        say=say,
        over=over,
    )
    if metered:
        journals.start()
    try:
        reconciler.start({endpoint.name: config_of(endpoint) for endpoint in spec.endpoints})
        say("ready")
        while not over.is_set():
            changed.clear()
            stamp = plan_directory.change_stamp()
            reconciler.tick()
            until = time.monotonic() + reconciler.pause
            while time.monotonic() < until and plan_directory.change_stamp() == stamp:
                if changed.wait(TICK_SECONDS):
                    break
    except (ServingError, PackagingError) as error:
        say("failed", message=str(error))
        return 1
    finally:
        reconciler.close()
        if metered:
            journals.close()
        fleet.leave()
        supervisor.close()
        if orphaned.is_set():
            _remove_after_workers(plan_directory, directory)
    return 0


def _ray_runtime(spec: ServeSpec, store: Store, endpoints: EndpointStore) -> RayRuntime | None:
    """Return the part that lets Ray start engine hosts; None for a server whose database no host can join."""
    return RayRuntime(endpoints, functools.partial(launch_of, spec, store)) if spec.settings.has_hosts else None


def _gateway_place(spec: ServeSpec) -> Path | None:
    """Return the directory of the locks of this host's gateways; None for a server that has its endpoints to itself."""
    return None if spec.settings.database is None else ledger_dir(spec.settings).parent / "gateways"


def _warn_of_keys(keys: Keys) -> None:
    """Warn where somebody has made keys and may believe that they count."""
    now_ms = keys.now_ms()
    count = sum(key.state(now_ms) == "active" for key in keys.list())
    if count:
        logger.warning(
            "the database has %d active API key%s, which this server does not read without --require-keys: every "
            "request is anonymous, and limits of keys and tenants do not apply to it",
            count,
            "s" * (count > 1),
        )


def _watch_stdin(over: threading.Event, orphaned: threading.Event, changed: threading.Event) -> None:
    """Wait for the end of standard input, and set ``orphaned`` if it came without the server's farewell.

    A killed server closes the pipe without it, and may still be our parent for a while.
    """
    said = b""
    while last := os.read(0, 4096):  # not sys.stdin: the interpreter would wait at exit for its lock, held here
        said = last
    if not said.endswith(child.FAREWELL):
        orphaned.set()
    over.set()
    changed.set()


def _remove_after_workers(plan_directory: PlanDirectory, directory: Path) -> None:
    """Remove the directory in place of the dead server, once its workers have finished."""
    until = time.monotonic() + ORPHANED_SECONDS
    while plan_directory.workers() and time.monotonic() < until:
        time.sleep(0.1)
    shutil.rmtree(directory, ignore_errors=True)


def _locate_nothing(entities: tuple[EntityConfig, ...]) -> tuple[ModelSource, ...]:
    raise AssertionError("configs are made by workers and the command line")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
