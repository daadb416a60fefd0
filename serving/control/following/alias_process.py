"""The process that asks MLflow's registry which versions aliases mean, and what metrics those versions have.

``python -m mlflow_llm.serving.control.following.alias_process QUESTIONS`` prints one JSON object. QUESTIONS are
``{alias's URI: [names of metrics]}`` as JSON. Like ``mlflow_resolver``, it keeps MLflow out of the server's processes;
unlike it, it fetches no model.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct

from ...interface.errors import PackagingError
from ...system import child
from ..mlflow_resolver import end_with_parent, run_lookup

HTTP = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}  # unless the operator set others
TIMEOUT_SECONDS = 120.0  # seconds for all questions, MLflow's import included
MAX_ERROR = 500  # characters of MLflow's own words


class Target(Struct, frozen=True, kw_only=True):
    """The version that an alias means: its ``uri``, and its ``metrics`` of the names that were asked for.

    ``error`` says why it is not known.
    """

    uri: str = ""
    metrics: dict[str, float] = {}
    error: str = ""


def ask(questions: Mapping[str, Iterable[str]]) -> dict[str, Target]:
    """Return what each alias means, by its URI. Raises ``PackagingError`` if the process fails or takes too long."""
    text = json.dumps({uri: sorted(names) for uri, names in questions.items()})
    output, status = run_lookup(child.python_command("serving.control.following.alias_process", text), TIMEOUT_SECONDS)
    try:
        return msgspec.json.decode(output.strip().splitlines()[-1], type=dict[str, Target])
    except (IndexError, msgspec.DecodeError):
        raise PackagingError(f"asking the registry failed with exit status {status}") from None


def look_up(uri: str, names: Iterable[str]) -> Target:
    """Return what the alias of ``uri`` means."""
    from mlflow.exceptions import MlflowException

    from mlflow_llm.flavors.llm.model.model_registry import pinned

    try:
        fixed = pinned(uri)
        return Target(uri=fixed, metrics=metrics_of(fixed, names))
    except (PackagingError, MlflowException, OSError) as error:
        return Target(error=str(error)[:MAX_ERROR])


def metrics_of(uri: str, names: Iterable[str]) -> dict[str, float]:
    """Return the newest values that MLflow has of metrics of a version: of its logged model, else of its run."""
    from mlflow import MlflowClient

    from mlflow_llm.flavors.llm.model.model_registry import logged_model_id
    from mlflow_llm.serving.model_files.model_uri import parse

    wanted, named = set(names), parse(uri)
    if not wanted or named is None:
        return {}
    client = MlflowClient()
    found: dict[str, float] = {}
    run = client.get_model_version(named.name, str(named.version)).run_id
    if run:
        found = {name: value for name, value in client.get_run(run).data.metrics.items() if name in wanted}
    if (model := logged_model_id(uri)) is not None:
        logged = client.get_logged_model(model).metrics or []
        newest = sorted((one for one in logged if one.key in wanted), key=lambda one: (one.timestamp, one.step))
        found |= {one.key: one.value for one in newest}
    return {name: float(value) for name, value in found.items()}


def main(words: list[str]) -> int:
    os.environ.update({name: value for name, value in HTTP.items() if name not in os.environ})
    found = {uri: look_up(uri, names) for uri, names in json.loads(words[0]).items()}
    print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
