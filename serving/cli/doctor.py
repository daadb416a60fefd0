"""``mlflow-llm doctor``: what a server would find here."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import click
import psutil

PACKAGES = (
    "mlflow-llm",
    "mlflow",
    "torch",
    "transformers",
    "peft",
    "safetensors",
    "msgspec",
    "pyzmq",
    "flask",
    "gunicorn",
    "gevent",
    "sqlalchemy",
    "prometheus_client",
)


@click.command()
@click.option("-m", "--model-uri", help="Also load this model and generate a token.")
def doctor(model_uri: str | None) -> None:
    """Show environment, versions, threads and memory; with a model, prove that it gives a token."""
    missing = 0
    click.echo(f"python       {platform.python_version()} on {platform.platform()}")
    for package in PACKAGES:
        try:
            click.echo(f"{package:<18} {version(package)}")
        except PackageNotFoundError:
            missing += 1
            click.echo(f"{package:<18} missing")
    memory = psutil.virtual_memory()
    click.echo(f"processors   {len(os.sched_getaffinity(0))} usable, {psutil.cpu_count(logical=False)} physical cores")
    click.echo(f"memory       {memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f}")
    click.echo(f"threads      OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}")
    if model_uri is not None:
        _try(model_uri)
    if missing:
        raise SystemExit(1)


def _try(uri: str) -> None:
    from ..transport.client import connect
    from ..web.warm import generate_one
    from .serve import endpoint_specs

    (spec,) = endpoint_specs({"doctor": uri}, {})
    with connect(spec.bundle, spec.engine, progress=lambda stage: click.echo(f"engine       {stage}")) as engine:
        seconds = generate_one(engine)
        info = engine.info
        click.echo(f"model        {', '.join(info.tasks)}; {info.dtype} on {info.device}; context {info.max_model_len}")
        click.echo(f"token        generated in {seconds:.3f} s")
