"""``mlflow-llm export``: write a logged model as a Hugging Face directory."""

from __future__ import annotations

import click

from ..model_names import located


@click.command()
@click.argument("model")
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--merge", metavar="ADAPTER", help="Merge this adapter into the weights.")
@click.option(
    "--adapter",
    "adapters",
    metavar="ADAPTER",
    multiple=True,
    help="Write this adapter beside the base (repeatable). Default: all, or none with --merge.",
)
def export(model: str, directory: str, merge: str | None, adapters: tuple[str, ...]) -> None:
    """Write a logged model as a Hugging Face directory.

    MODEL is a registered model (NAME, NAME/VERSION, NAME@ALIAS or models:/…), another URI that MLflow can download, or
    the directory of a logged model. DIRECTORY must be empty or not exist yet. transformers, sentence-transformers and
    vLLM load it; each adapter is in DIRECTORY/adapters/ADAPTER in peft's form.
    """
    from mlflow.exceptions import MlflowException

    from mlflow_llm.flavors import llm

    try:
        written = llm.export(located(model), directory, merge=merge, adapters=list(adapters) or None)
    except (MlflowException, ValueError) as error:
        raise click.ClickException(str(getattr(error, "message", error))) from None
    click.echo(str(written))
