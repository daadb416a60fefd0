"""``mlflow-llm engine``: an engine on this host for servers on others, or with --join those that they place here;
``mlflow-llm engine-key``: what they share."""

from __future__ import annotations

import errno
import logging
import os
import signal
from typing import Any

import click
import msgspec

from ...control.settings import default_state_dir
from ...supervision.engine_host import NAME, EngineHost
from ...supervision.engine_spec import EngineSpec
from ...transport.auth import check_address, read_key, write_key
from .. import start_log
from ..model_options import endpoint_specs, engine_overrides
from .sizes import Size
from .spec_files import read_engine_spec

SIZE = Size()
LISTEN = "tcp://127.0.0.1:5601"
LEVELS = {"restarting": logging.WARNING, "failed": logging.ERROR}


@click.command(epilog="Engine settings: mlflow-llm help settings")
@click.option("-m", "--model-uri", "model_uri", help="URI of the model, e.g. models:/assistant@champion.")
@click.option(
    "--join",
    metavar="URL",
    help="Database of the servers, e.g. postgresql://…: this host offers to run engines, and the servers place them.",
)
@click.option(
    "--memory", type=SIZE, metavar="BYTES", help="With --join: memory of all engines together (default: this host's)."
)
@click.option("--name", help="With --join: name of this host in lists and messages (default: its host name).")
@click.option(
    "--listen",
    default=LISTEN,
    show_default=True,
    help="Address for servers, tcp://host:port; with --join, further engines have the next ports.",
)
@click.option("--key-file", required=True, help="File with the key that servers share, made by mlflow-llm engine-key.")
@click.option(
    "-C",
    "--config",
    "config",
    multiple=True,
    metavar="KEY=VALUE",
    help="Engine setting (mlflow-llm help settings); repeatable. With --join: a grant, such as trust_remote_code=true.",
)
@click.option(
    "--adapter-dir",
    "adapter_dirs",
    multiple=True,
    type=click.Path(exists=True, file_okay=False),
    help="Directory from which servers may load adapters; repeatable. By default there is none.",
)
@click.option(
    "--drain-timeout",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds that running requests have after SIGTERM.",
)
@click.option(
    "--spec", "spec_file", type=click.Path(exists=True, dir_okay=False), help="Model and settings in a JSON file."
)
@click.option("--log-file", metavar="FILE", help="File to which the log is appended as JSON, besides standard error.")
@click.option("--runtime-dir", hidden=True)
@click.option("--only", hidden=True)  # the engine that a runtime has started this host for
def engine(
    model_uri: str | None,
    join: str | None,
    memory: int | None,
    name: str | None,
    listen: str,
    key_file: str,
    config: tuple[str, ...],
    adapter_dirs: tuple[str, ...],
    drain_timeout: float,
    spec_file: str | None,
    log_file: str | None,
    runtime_dir: str | None,
    only: str | None,
) -> None:
    """Run an engine on this host for servers on other hosts.

    The servers are started with `mlflow-llm serve --engine tcp://HOST:PORT`. The engine runs until a signal ends it.

    With --join, no model is named: the host runs what the servers of the database place on it.
    """
    from ...supervision.warm_up import generate_one

    start_log.begin("info", log_file)
    check_address(listen)
    read_key(key_file)
    if join is not None:
        if model_uri is not None or spec_file is not None:
            raise click.UsageError("-m and --spec do not go with --join: the servers say what runs here")
        from .join import run_joined  # and SQLAlchemy

        run_joined(
            join,
            memory=memory,
            name=name,
            listen=listen,
            key_file=key_file,
            config=config,
            adapter_dirs=adapter_dirs,
            drain_timeout=drain_timeout,
            state_dir=runtime_dir,
            only=only,
        )
        return
    if memory is not None or name is not None or only is not None:
        raise click.UsageError("--memory, --name and --only go with --join")
    model = msgspec.structs.replace(
        _model(model_uri, spec_file, config),
        listen=listen,
        key_file=key_file,
        adapter_dirs=adapter_dirs,
        journals=journal_root(),
        drain_timeout=drain_timeout,
    )
    host = EngineHost(model, probe=generate_one, say=say, state_dir=runtime_dir)
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, lambda *_: host.stop())
    host.run()


@click.command("engine-key")
@click.argument("file")
def engine_key(file: str) -> None:
    """Create the key for engines on other hosts.

    The key is written to FILE, which only its owner can read. Copy it to every host.
    """
    write_key(file)
    click.echo(f"wrote a new key to {file}", err=True)


def journal_root() -> str:
    """Return where this host keeps the counts of what its engine generates; "", with a warning, if it has no place."""
    try:
        found = default_state_dir()
        found.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(found, os.W_OK):
            raise PermissionError(errno.EACCES, f"{found} cannot be written")
    except OSError as error:
        text = f"servers do not learn what this engine generates, beyond what they receive: {error.strerror or error}"
        start_log.say(text, "journals", level=logging.WARNING)
        return ""
    return str(found)


def _model(model_uri: str | None, spec_file: str | None, config: tuple[str, ...]) -> EngineSpec:
    if (model_uri is None) == (spec_file is None):
        raise click.UsageError("name a model with -m, or a file with --spec")
    if model_uri is None:
        return read_engine_spec(str(spec_file))
    overrides = engine_overrides(config)
    start_log.say("reading the model", "reading")
    (spec,) = endpoint_specs({NAME: model_uri}, overrides)
    return EngineSpec(bundle=spec.bundle, settings=spec.engine)


def say(stage: str, **facts: Any) -> None:
    """Log an event of the engine."""
    text = {
        "loading": "loading",
        "ready": (
            f"first token ({facts.get('seconds')} s); listening on {facts.get('address')}; "
            f"kernels: {facts.get('kernels')}"
        ),
        "restarting": "the engine has ended or hangs; restarting it",
        "failed": f"the engine does not start: {facts.get('message')}; trying again",
        "draining": f"shutting down; running requests have {facts.get('seconds')} s",
        "stopped": "stopped",
    }[stage]
    fields = {name: facts[name] for name in ("seconds", "address", "kernels", "message") if name in facts}
    start_log.say(text, stage, level=LEVELS.get(stage, logging.INFO), **fields)
