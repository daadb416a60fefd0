"""``mlflow-llm import``: bring a model, or a command line, from another program."""

from __future__ import annotations

from typing import Any

import click

from .vllm_command import vllm


@click.group("import")
def import_() -> None:
    """Import a model or a command line from another program."""


def _logged(act: Any) -> None:
    """Log a model, and print its URI, and its version if it was registered."""
    from mlflow.exceptions import MlflowException

    try:
        info = act()
    except (MlflowException, ValueError) as error:
        raise click.ClickException(str(getattr(error, "message", error))) from None
    click.echo(info.model_uri)
    if info.registered_model_version is not None:
        click.echo(f"version {info.registered_model_version}", err=True)


name_option = click.option("--name", help='Name of the logged model (default: that of --register, or "model").')
register_option = click.option("--register", metavar="NAME", help="Register it as a version of this model.")


@import_.command()
@click.argument("modelfile", type=click.Path(exists=True, dir_okay=False))
@name_option
@register_option
@click.option("--model", metavar="PATH|ID", help="A GGUF file, directory or hub id in place of what FROM names.")
@click.option("--chat-template", metavar="FILE|model", help="A Jinja template in place of TEMPLATE.")
def ollama(
    modelfile: str, name: str | None, register: str | None, model: str | None, chat_template: str | None
) -> None:
    """Log the model of an Ollama Modelfile.

    What has no effect here is named, and what cannot be converted is refused by its line. FROM is a GGUF file or a
    directory; `ollama show --modelfile NAME` prints the file of a model in Ollama's own store.
    """
    from mlflow_llm.flavors import llm

    _logged(
        lambda: llm.from_modelfile(
            modelfile,
            name=name or register or "model",
            model=model,
            chat_template=chat_template,
            registered_model_name=register,
        )
    )


@import_.command()
@click.argument("uri")
@name_option
@register_option
def transformers(uri: str, name: str | None, register: str | None) -> None:
    """Log a model of mlflow.transformers in this flavor.

    URI is a registered model (models:/…), another URI that MLflow can download, or a directory.
    """
    from mlflow_llm.flavors import llm

    _logged(lambda: llm.from_transformers_model(uri, name=name or register or "model", registered_model_name=register))


import_.add_command(vllm)
