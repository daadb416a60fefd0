"""``mlflow-llm models``: registered models, the cache, and what runs; ``mlflow-llm ps``: what runs alone."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any

import click
import msgspec

from ...model_files import cached_copies, downloads
from ...system.escape import visible_line
from ...system.sizes import readable
from ...system.step_line import duration
from ..store import table
from .cached import Cached, cached, remove, total
from .running import RunningEngine, RunningServer, engines, servers

DAY_SECONDS = 86_400.0
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(invoke_without_command=True)
@as_json
@click.option("--no-registry", is_flag=True, help="Do not ask MLflow for registered models.")
@click.pass_context
def models(context: click.Context, as_json: bool, no_registry: bool) -> None:
    """List registered models, cached copies and what runs.

    Registered models are those of this flavor in MLflow's registry (MLFLOW_TRACKING_URI). The cache has downloads of
    remote stores, copies of models that were not logged, and packed weights. Sizes are those of the files; the
    total counts a file that several entries share once.
    """
    if context.invoked_subcommand is not None:
        return
    found: dict[str, Any] = {"registered": []}
    reason = ""
    if not no_registry:
        from .registered import registered

        found["registered"], reason = registered()
    found |= {"cached": _cached(), "servers": servers()}
    found["engines"] = engines(found["servers"])
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(found), indent=2))
        return
    if not no_registry:
        rows = [
            (
                one.name,
                one.latest,
                str(one.versions),
                ", ".join(f"@{alias} ({version})" for alias, version in sorted(one.aliases.items())),
                "" if one.size is None else readable(one.size),
            )
            for one in found["registered"]
        ]
        _section("registered models", ("name", "latest", "versions", "aliases", "size"), rows, reason)
    rows = [(one.kind, one.name, one.model, ago(one.used), readable(one.size)) for one in found["cached"]]
    taken = f"{readable(total(found['cached']))} on the disk" if rows else ""
    _section("cache", ("kind", "name", "model", "last use", "size"), rows, taken)
    _show_running(found["servers"], found["engines"])


@models.command()
@click.option("--days", type=click.FloatRange(0), default=30.0, show_default=True, help="Unused for so many days.")
@click.option("--all", "everything", is_flag=True, help="Everything that no process uses.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def prune(days: float, everything: bool, dry_run: bool) -> None:
    """Remove what was not used for a while from the cache.

    The cache is bounded anyway: downloads by MLFLOW_LLM_DOWNLOADS_LIMIT (100 GB), copies of models that were not logged
    by MLFLOW_LLM_COPIES_LIMIT (100 GB), packed weights by the engine setting packed_cache (32 GiB). What a running
    engine uses stays.
    """
    before = time.time() - (0.0 if everything else days * DAY_SECONDS)
    folders = [one.folder for one in engines()]
    freed = 0
    for one in _cached():
        if one.used > before and not everything:
            continue
        if dry_run or remove(one, folders):
            freed += one.size
            click.echo(f"{'would remove' if dry_run else 'removed'} {one.kind} {one.name}, {readable(one.size)}")
        else:
            click.echo(f"{one.kind} {one.name} is in use", err=True)
    click.echo(f"{readable(freed)} {'would be ' if dry_run else ''}freed")


@models.command()
@click.argument("model")
@as_json
def show(model: str, as_json: bool) -> None:
    """Show what a logged model is, and where its adapters come from.

    MODEL is a registered model (NAME, NAME/VERSION, NAME@ALIAS or models:/…), another URI, or the directory of a logged
    model. Its weights are not fetched.
    """
    from .facts import facts_of

    found = facts_of(model)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        click.echo(f"{name}: {visible_line(value)}")


@click.command()
@as_json
def ps(as_json: bool) -> None:
    """List the running servers and engines of this user.

    Servers and engines are found in the temporary directory and the runtime directory (XDG_RUNTIME_DIR) that they
    were started with.
    """
    running = servers()
    processes = engines(running)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins({"servers": running, "engines": processes}), indent=2))
        return
    _show_running(running, processes)


def _show_running(running: list[RunningServer], processes: list[RunningEngine]) -> None:
    rows = [
        (
            str(one.pid),
            ", ".join(one.addresses) or "loading",
            ", ".join(f"{name} ({uri})" for name, uri in one.endpoints.items()),
            readable(one.memory),
        )
        for one in running
    ]
    _section("servers", ("pid", "address", "endpoints", "memory"), rows)
    lines = [(str(one.pid), one.state, one.model, str(one.clients), readable(one.memory)) for one in processes]
    _section("engines", ("pid", "state", "model", "clients", "memory"), lines)


def _section(title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], note: str = "") -> None:
    click.echo(title + (f" ({note})" if note else "") + ("" if rows else ": none"))
    if rows:
        click.echo("  " + table(heads, rows, right=1).replace("\n", "\n  "))


def _cached() -> list[Cached]:
    with contextlib.suppress(OSError):  # a user without a home directory has no cache
        return cached()
    return []


def ago(when: float) -> str:
    """Return how long ago a time was: ``5 s ago``, ``3 h ago``, ``12 days ago``."""
    seconds = max(0.0, time.time() - when)
    if seconds < 3600:
        return f"{duration(seconds)} ago"
    return f"{seconds / 3600:.0f} h ago" if seconds < 2 * DAY_SECONDS else f"{seconds / DAY_SECONDS:.0f} days ago"


LIMITS = (downloads.LIMIT_VARIABLE, cached_copies.LIMIT_VARIABLE)
"""The variables that bound the cache."""
