"""``mlflow-llm engine --join``: this host as one that runs what the servers of a database place on it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from typing import Any

import click

from ...control.hosts.agent import HostAgent
from ...control.hosts.host_adapters import HostAdapters
from ...control.hosts.host_identity import HostIdentity
from ...control.hosts.journals import HostJournals
from ...control.model_sources import with_files
from ...control.settings import default_state_dir
from ...endpoints.adapter_contents import AdapterContents
from ...endpoints.engine_hosts import EngineHosts, HostDevice, Offer, Start
from ...interface.settings import GRANTED
from ...supervision.warm_up import generate_one
from ...system.cpus import num_threads
from ...system.main_memory import main_memory
from .. import start_log
from ..model_options import engine_overrides
from ..store import opened

GPUS = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
GPU_SECONDS = 20.0
MIB = 2**20


def granted(config: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings that this host grants. Raises ``UsageError`` for others, which servers send with the
    model."""
    found = engine_overrides(config)
    for key in found:
        if key not in GRANTED:
            allowed = f"with --join, one of {', '.join(GRANTED)}; the servers send the other settings"
            raise click.UsageError(f"-C {key}: {allowed}")
    return found


def run_joined(
    url: str,
    *,
    memory: int | None,
    name: str | None,
    config: tuple[str, ...],
    state_dir: str | None,
    only: str | None,
    **options: Any,
) -> None:
    """Run this host for the database at ``url`` until a signal ends it.

    A runtime that starts it for the engine ``only`` writes the URL, which may have a password, as the first line of its
    standard input, and keeps that open: the host drains when it closes.

    Raises ``UsageError``, ``ClickException``, ``PackagingError``.
    """
    if only is not None:
        url = _first_line()
    grants, identity = granted(config), HostIdentity(default_state_dir())
    with opened(url, make=True) as store:
        agent = HostAgent(
            EngineHosts(store),
            Offer(
                memory=memory or main_memory().total,
                cpus=num_threads(),
                devices=devices(),
                start=None if only is None else Start(engine=only),
            ),
            host=identity.host,
            name=name or socket.gethostname(),
            find=with_files,
            probe=generate_one,
            grants=grants,
            say=say,
            state_dir=state_dir,
            journals=HostJournals(store, default_state_dir()),
            adapters=HostAdapters(AdapterContents(store, time.time), default_state_dir() / "adapter-requests"),
            **options,
        )
        for ending in (signal.SIGTERM, signal.SIGINT):
            signal.signal(ending, lambda *_: agent.stop())
        if only is not None:
            threading.Thread(target=_stop_at_end_of_input, args=(agent,), daemon=True).start()
        agent.run()
    identity.lock.release()


def _first_line() -> str:
    """Return the first line of standard input; not by ``sys.stdin``, whose lock a thread holds at exit."""
    found = b""
    while not found.endswith(b"\n") and (more := os.read(0, 1)):
        found += more
    return found.decode().strip()


def _stop_at_end_of_input(agent: HostAgent) -> None:
    while os.read(0, 4096):
        pass
    agent.stop()


def devices() -> tuple[HostDevice, ...]:
    """Return the GPUs of this host, as NVIDIA's own command lists them; none where there is no such command."""
    try:
        found = subprocess.run(GPUS, capture_output=True, text=True, timeout=GPU_SECONDS, check=True)
        rows = [line.rpartition(",") for line in found.stdout.splitlines() if line.strip()]
        return tuple(HostDevice(name=name.strip(), memory=int(size) * MIB) for name, _, size in rows)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()


def say(stage: str, **facts: Any) -> None:
    """Log an event of the host."""
    text = {
        "joined": (
            f"joined as {facts.get('host')}: {(facts.get('memory') or 0) / 2**30:.1f} GiB of memory, "
            f"{facts.get('cpus')} CPUs, GPUs: {facts.get('gpus')}"
        ),
        "placed": f"{facts.get('model')} was placed here",
        "failed": f"{facts.get('model')} does not start: {facts.get('message')}",
        "draining": f"{facts.get('model')} ends; its running requests have {facts.get('seconds')} s",
        "stopped": "stopped",
    }[stage]
    start_log.say(text, stage, level=logging.ERROR if stage == "failed" else logging.INFO, **facts)
