"""``from_transformers_model``: log a model of ``mlflow.transformers`` in this flavor."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModelInput
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.models.model import ModelInfo
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from ....serving.interface.errors import PackagingError, reason, shown
from ....serving.model_files.model_uri import in_store
from ..errors import raises_mlflow
from ..model import fetch, generation_config, model_registry
from ..model.names import FLAVOR_NAME, MLMODEL
from ..save.save_model import log_model
from . import transformers_parts as parts
from .prompt_template import chat_template_of

logger = logging.getLogger(__name__)

SOURCE = "llm.imported_from"
OWN_KEYS = ("return_full_text", "include_prompt", "collapse_whitespace")  # what a pyfunc of mlflow.transformers returns
TASKS: dict[str | None, Any] = {
    "llm/v1/chat": "chat",
    "llm/v1/completions": "completions",
    "llm/v1/embeddings": "embeddings",
    "text-generation": None,
    "image-text-to-text": None,
    "feature-extraction": "embeddings",
}


@raises_mlflow
def from_transformers_model(model_uri: str | os.PathLike[str], name: str | None = None, **arguments: Any) -> ModelInfo:
    """Log the model that ``mlflow.transformers`` saved at ``model_uri`` in this flavor.

    Weights, tokenizer, chat template, adapters, prompt template, default parameters, metadata and licence are taken
    over. A model that was saved without its weights (``save_pretrained=False``, or a peft model over a base of the hub)
    is fetched from the hub by the name and revision that it has stored.

    Args:
        model_uri: a local directory, or any URI that MLflow can download.
        name: the name of the logged model.
        arguments: any argument of ``log_model``, which takes the place of what the model says: ``model=DIR`` for
            weights that are elsewhere now, ``task=``, ``defaults=``, ``registered_model_name=`` and so on.

    Returns:
        MLflow's description of the logged model.

    Raises:
        MlflowException: ``errors.PackagingError`` for a model of another flavor or task, for a reference to weights
            that cannot be fetched, and for what ``log_model`` refuses. A warning names what has no counterpart here.
    """
    with tempfile.TemporaryDirectory(prefix="mlflow-llm-") as folder:
        scratch = Path(folder)
        root, uri = _fetched(model_uri, scratch)
        described = _described(root, uri or str(model_uri))
        flavor = described.flavors[parts.FLAVOR]
        found = _arguments(root, described, flavor, scratch, arguments)
        if uri is not None:
            found["tags"] = {SOURCE: uri} | (found.get("tags") or {})
        info = log_model(name=name, **found)
    _link(info, uri)
    return info


def _fetched(model_uri: Any, scratch: Path) -> tuple[Path, str | None]:
    """Return the files of the model on this machine, and its URI if it is in a store, with the version pinned."""
    if not isinstance(model_uri, str | os.PathLike) or not str(model_uri):
        raise PackagingError(f"model_uri: {shown(model_uri)} is not allowed; expected a directory or a URI of MLflow")
    if Path(model_uri).is_dir():
        return Path(model_uri).absolute(), None
    given = str(model_uri)
    uri = model_registry.pinned(given) if in_store(given) else given
    try:
        store = get_artifact_repository(uri)
        target = None if fetch.is_local(store) else str(scratch / "source")
        if target is not None:
            Path(target).mkdir()
        return Path(store.download_artifacts("", target)), uri
    except PackagingError:
        raise
    except Exception as error:  # a store's client raises what it likes
        raise model_registry.not_found_in_store(uri, reason(error)) from None


def _described(root: Path, uri: str) -> Model:
    if not (root / MLMODEL).is_file():
        raise PackagingError(f"model_uri: {shown(uri)} holds no {MLMODEL}: it is not a model that MLflow saved")
    described = Model.load(str(root))
    if parts.FLAVOR in described.flavors:
        return described
    if FLAVOR_NAME in described.flavors:
        raise PackagingError(f"model_uri: {shown(uri)} is a model of this flavor already; load or serve it as it is")
    known = ", ".join(sorted(described.flavors))
    raise PackagingError(f"model_uri: {shown(uri)} was not saved by mlflow.transformers; its flavors are {known}")


def _arguments(
    root: Path, described: Model, flavor: dict[str, Any], scratch: Path, given: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of ``log_model`` for the model; those of the caller take the place of what it says."""
    asked = str(flavor.get("inference_task") or flavor.get("task"))
    if "task" not in given and asked not in TASKS:
        known = ", ".join(str(task) for task in TASKS)
        raise PackagingError(f"model_uri: its task {shown(asked)} is not supported; expected one of {known}, or task=")
    found: dict[str, Any] = parts.weights(root, flavor, scratch, given)
    found |= parts.adapters(root, flavor) if "adapters" not in given else {}
    if (run_id := _run(described)) is not None and found.get("adapters"):
        found["adapter_runs"] = dict.fromkeys(found["adapters"], run_id)
    metadata = {key: value for key, value in (described.metadata or {}).items() if key != "task"}
    template = metadata.get("prompt_template")
    found |= _task(asked, template, root, flavor, found, given)
    found["metadata"] = metadata
    if defaults := _defaults(described):
        found["defaults"] = defaults | (given.get("defaults") or {})
    if (dtype := parts.changed_dtype(flavor, found.get("model"))) is not None:
        found["dtype"] = dtype
    if (code := parts.code_paths(root, flavor)) is not None:
        found["code_paths"] = code
    return found | {key: value for key, value in given.items() if key != "defaults" or not defaults}


def _task(
    asked: str, template: Any, root: Path, flavor: dict[str, Any], found: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Return the task, and the chat template of a prompt template, so that ``predict`` of a text does what it did."""
    if asked == "llm/v1/embeddings":
        # the vector of the first token, as mlflow.transformers returns it
        return {"task": "embeddings", "embedding": {"pooling": "cls", "normalize": False}}
    if asked == "feature-extraction" and "embedding" not in given:
        logger.warning(
            "the pipeline returned a vector for each token; here a text has one, as the model's files say or by their"
            " mean (embedding=)"
        )
    if template is not None and "chat_template" not in given:
        if asked != "text-generation":
            raise PackagingError(
                f"prompt_template: {shown(template)} is not taken over beside task {shown(asked)}; expected"
                " chat_template= with the template to use"
            )
        return {"chat_template": chat_template_of(str(template), given.get("tokenizer") or found["tokenizer"])}
    task = TASKS.get(asked)
    has_template = "chat_template" in given or parts.has_chat_template(given.get("tokenizer") or found.get("tokenizer"))
    if asked == "text-generation":
        return {"task": ["completions", "chat"] if has_template else "completions"}
    if task == "completions" and has_template:
        return {"task": ["completions", "chat"]}
    if task == "chat" and has_template:
        return {"task": ["chat", "completions"]}
    return {} if task is None else {"task": task}


def _defaults(described: Model) -> dict[str, Any]:
    """Return the parameters of the saved ``predict`` as defaults of requests: its model_config, and over it those of
    the signature. Others are named in a warning."""
    config = dict(described.flavors.get("python_function", {}).get("config") or {})
    params = getattr(described.signature, "params", None)
    config |= {one.name: one.default for one in params.params} if params is not None else {}
    whole = [key for key in ("return_full_text", "include_prompt") if config.get(key) is True]
    own = {key: config.pop(key, None) for key in OWN_KEYS}
    found, rest = generation_config.divided(config)
    rest |= {key: own[key] for key in whole} | ({"collapse_whitespace": True} if own["collapse_whitespace"] else {})
    if rest:
        listed = "; ".join(generation_config.without_effect(name, value) for name, value in rest.items())
        logger.warning("parameters of the saved model that have no effect here: %s", listed)
    return found


def _run(described: Model) -> str | None:
    """Return the run that logged the model, if the tracking store still has it."""
    if not described.run_id:
        return None
    try:
        MlflowClient().get_run(described.run_id)
    except MlflowException:
        return None
    return str(described.run_id)


def _link(info: ModelInfo, uri: str | None) -> None:
    """Make the source an input of the run that logged the copy."""
    source = None if uri is None else model_registry.logged_model_id(uri)
    if info.run_id is None or source is None:
        return
    try:
        MlflowClient().log_inputs(info.run_id, models=[LoggedModelInput(source)])
    except MlflowException as error:
        logger.warning("the model is logged, but MLflow did not take its lineage: %s", reason(error))
