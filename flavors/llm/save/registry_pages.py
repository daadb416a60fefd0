"""Params, tags, metrics and description of a logged model and of its version, as MLflow's pages show them.

Everything comes from the MLmodel file, and nothing that a user has set is replaced. A store that refuses some of it is
no reason to lose a model that is logged already: a warning says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import DatasetInput, LoggedModelInput, Metric
from mlflow.exceptions import MlflowException
from mlflow.models.model import ModelInfo

from ....serving.interface.errors import reason
from ....serving.model_files.model_uri import RegisteredModel
from ....serving.system.sizes import readable
from ..model import model_registry
from ..model.names import FLAVOR_NAME
from ..model.stored_facts import AdapterFacts, Facts, line_of, stored_facts
from .adapter_sources import datasets_of

logger = logging.getLogger(__name__)

PREFIX = "llm."
NOTE = "mlflow.note.content"  # the description that MLflow shows
ADAPTERS_SHOWN = 50  # those with params of their own; the names of all are in one
MAX_VALUE = 500  # characters of a param or tag
MAX_PARAMS = 100  # params that MLflow takes at once
EXAMPLE = {"chat": '"Hello"', "completions": '"Once upon a time"', "embeddings": '["A text"]'}
PAIR = '{"query": "What is a fox?", "documents": ["An animal.", "A colour."]}'


def show(info: ModelInfo, registered_name: str | None, *, step: int = 0) -> None:
    """Write what MLflow's pages show of the model that was logged as ``info``, and of the version registered with it.

    ``step`` is that of the metrics, in the run that logged the model. Without a run there are no metrics.
    """
    flavor = info.flavors[FLAVOR_NAME]
    facts = stored_facts(flavor)
    if facts is None or info.model_id is None:
        return
    client, version = MlflowClient(), info.registered_model_version
    params = params_of(flavor, facts)
    name = str(registered_name) if version is not None else None
    uri = f"models:/{info.model_id}"
    if name is not None:
        uri = RegisteredModel(name=name, version=str(version)).uri
    note = description(flavor, facts, uri)
    _attempt("params", lambda: _log_params(client, str(info.model_id), params))
    _attempt("description", lambda: _set_tags(client, str(info.model_id), params, note))
    if info.run_id is not None:
        _attempt("metrics", lambda: _log_metrics(client, info, facts, step))
        _attempt("lineage", lambda: _log_inputs(client, str(info.run_id), flavor.get("base"), facts))
    if name is not None:
        _attempt("tags of the version", lambda: _describe_version(client, name, str(version), params, note))


def params_of(flavor: dict[str, Any], facts: Facts) -> dict[str, str]:
    """Return a model's facts as params. Those that are not known are left out."""
    found: dict[str, Any] = {
        "base": flavor.get("base") or facts.name,
        "content_hash": flavor["content_hash"],
        "base_hash": facts.base_hash,
        "architecture": facts.architecture,
        "parameters": facts.parameters,
        "weight_bytes": facts.weight_bytes,
        "dtype": facts.dtype,
        "quantization": flavor.get("quantization") or "none",
        "context_length": facts.context_length,
        "tasks": ", ".join(flavor["tasks"]),
        "license": facts.license,
        "adapters": ", ".join(facts.adapters) or None,
    }
    for name, adapter in list(facts.adapters.items())[:ADAPTERS_SHOWN]:
        found |= {f"adapter.{name}.{key}": value for key, value in _of_adapter(adapter).items()}
    return {PREFIX + key: str(value)[:MAX_VALUE] for key, value in found.items() if value is not None}


def _of_adapter(adapter: AdapterFacts) -> dict[str, Any]:
    return {
        "method": adapter.method,
        "rank": adapter.rank,
        "base": adapter.base,
        "source": adapter.lineage.source,
        "run_id": adapter.lineage.run_id,
        "datasets": ", ".join(adapter.lineage.datasets) or None,
    }


def description(flavor: dict[str, Any], facts: Facts, uri: str) -> str:
    """Return the description of a model as Markdown: what it is, and how it is served and asked."""
    name = flavor.get("base") or facts.name
    of = [f"{facts.parameters:,} parameters"]
    if (stored := flavor.get("quantization") or facts.dtype) is not None:
        of.append(f"{stored}, {readable(facts.weight_bytes)}")
    of.append(f"a context of {facts.context_length:,} tokens")
    lines = [f"{code(name or 'A language model')} ({code(facts.architecture or 'unknown')}): {', '.join(of)}."]
    lines.append(f"Tasks: {', '.join(flavor['tasks'])}. Licence: {code(facts.license or 'not stated')}.")
    if facts.adapters:
        lines += ["", "Adapters:", ""]
        lines += [adapter_line(name, one) for name, one in list(facts.adapters.items())[:ADAPTERS_SHOWN]]
        if (more := len(facts.adapters) - ADAPTERS_SHOWN) > 0:
            lines.append(f"- and {more} more")
    asked = PAIR if flavor["tasks"][0] == "score" else EXAMPLE[flavor["tasks"][0]]
    commands = [f"mlflow-llm serve -m {uri}"]
    if flavor["tasks"][0] == "chat":
        commands.append(f'mlflow-llm chat -m {uri} "Hello"')
    lines += ["", "Serve it, or ask it at once:", "", "```bash", *commands, "```", "", "In Python:", "", "```python"]
    lines += ["import mlflow", "", f'model = mlflow.pyfunc.load_model("{uri}")', f"model.predict({asked})", "```"]
    return "\n".join(lines)


def adapter_line(name: str, adapter: AdapterFacts) -> str:
    """Return an entry of a list in Markdown for an adapter."""
    return f"- {code(name)}: {line_of(adapter, '`')}"


def code(text: str) -> str:
    """Return ``text``, which a checkpoint may have given, as a span of code, in which Markdown has no effect."""
    return f"`{text.replace('`', chr(39))}`"


def _attempt(what: str, act: Callable[[], None]) -> None:
    try:
        act()
    except MlflowException as error:
        logger.warning("the model is logged, but MLflow did not take its %s: %s", what, reason(error))


def _log_params(client: MlflowClient, model_id: str, params: dict[str, str]) -> None:
    known = client.get_logged_model(model_id).params
    missing = [(key, value) for key, value in params.items() if key not in known]
    for start in range(0, len(missing), MAX_PARAMS):
        client.log_model_params(model_id, dict(missing[start : start + MAX_PARAMS]))


def _set_tags(client: MlflowClient, model_id: str, params: dict[str, str], note: str) -> None:
    tags = client.get_logged_model(model_id).tags
    wanted = {**_tags(params), NOTE: note}
    client.set_logged_model_tags(model_id, {key: value for key, value in wanted.items() if key not in tags})


def _tags(params: dict[str, str]) -> dict[str, str]:
    """Return the params by which models are searched for: those of the adapters are not among them."""
    return {key: value for key, value in params.items() if not key.startswith(f"{PREFIX}adapter.")}


def _log_metrics(client: MlflowClient, info: ModelInfo, facts: Facts, step: int) -> None:
    now = int(time.time() * 1000)
    values = {"weight_bytes": facts.weight_bytes, "parameters": facts.parameters, "adapter_bytes": facts.adapter_bytes}
    metrics = [
        Metric(PREFIX + key, value, now, step, model_id=info.model_id, run_id=info.run_id)
        for key, value in values.items()
    ]
    client.log_batch(str(info.run_id), metrics=metrics)


def _log_inputs(client: MlflowClient, run_id: str, base: str | None, facts: Facts) -> None:
    """Link the run that logged the model to its base and to the datasets that its adapters were trained on."""
    sources = [adapter.lineage.source for adapter in facts.adapters.values()]
    models = dict.fromkeys(filter(None, map(model_registry.logged_model_id, filter(None, (base, *sources)))))
    runs = dict.fromkeys(adapter.lineage.run_id for adapter in facts.adapters.values())
    datasets = list(_distinct(one for run in runs if run not in (None, run_id) for one in datasets_of(str(run))))
    if models or datasets:
        inputs = [LoggedModelInput(model_id) for model_id in models]
        client.log_inputs(run_id, datasets=datasets, models=inputs)


def _distinct(inputs: Iterable[DatasetInput]) -> Iterable[DatasetInput]:
    return {(one.dataset.name, one.dataset.digest): one for one in inputs}.values()


def _describe_version(client: MlflowClient, name: str, version: str, params: dict[str, str], note: str) -> None:
    found = client.get_model_version(name, version)
    for key, value in _tags(params).items():
        if key not in found.tags:
            client.set_model_version_tag(name, version, key, value)
    if not found.description:
        client.update_model_version(name, version, description=note)
