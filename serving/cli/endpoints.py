"""``mlflow-llm endpoints``: what a server serves."""

from __future__ import annotations

import json

import click

from .http import Client, url_options


@click.command()
@url_options
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def endpoints(url: str, key: str | None, as_json: bool) -> None:
    """List the server's endpoints and adapters."""
    models = Client(url, key, timeout=30).get("/v1/models")["data"]
    if as_json:
        click.echo(json.dumps(models, indent=2))
        return
    for model in models:
        click.echo(f"{model['id']}\t{model['root']}\tcontext {model['max_model_len']}")
