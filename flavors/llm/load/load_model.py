"""``load_model``, the loader that MLflow calls, and ``close``, which releases the engine of a loaded model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from mlflow.exceptions import MlflowException

from ....serving.system.imports import hide_torch
from ..errors import raises_mlflow
from ..model.bundle_reader import configured
from ..model.fetch import local_root
from ..model.model_name import name_of
from ..model.model_registry import pinned
from ..model.options import LoadOptions
from ..predict import signature_enforcement
from ..predict.language_model import LanguageModel
from ..predict.pyfunc import PyfuncModel
from ..predict.scoring_server import is_scoring_server
from ..predict.session import Session
from ..save import mlflow_requirements
from .draft import with_draft
from .mlflow_download import loaded_uri, settled
from .model_cache import logged

if TYPE_CHECKING:
    from mlflow.pyfunc import PyFuncModel

    from ..predict.responses_agent import LoggedModelAgent

mlflow_requirements.install()

M = TypeVar("M", bound="LanguageModel | PyfuncModel | PyFuncModel")


@raises_mlflow
def load_model(model_uri: str, dst_path: str | None = None, **settings: Unpack[LoadOptions]) -> LanguageModel:
    """Load a logged model as an object with ``chat``, ``complete`` and ``embed``.

    The engine starts at the first request, not here.

    Args:
        model_uri: a local directory, or any URI that MLflow can download (``models:/assistant@champion``). A model that
            is not logged yet, a Hugging Face directory, a GGUF file or a hub id, is logged into the user's cache first.
        dst_path: a local directory to download to, made if it does not exist. None: a model of a remote store is
            downloaded once, into the user's cache.
        settings: engine settings (``serving.settings.EngineSettings``) that replace the saved ones, such as
            ``dtype="bfloat16"``; also ``default_adapter``, ``defaults`` and ``generation_config`` (``{}`` for none).

    Raises:
        MlflowException: ``errors.ModelNotFound`` if there is no such model; ``errors.PackagingError`` if it is damaged
            or of a later format, or if a setting is not allowed.
    """
    return LanguageModel.over(_session(model_uri, dst_path, dict(settings)))


@raises_mlflow
def as_responses_agent(
    model_uri: str, dst_path: str | None = None, **settings: Unpack[LoadOptions]
) -> LoggedModelAgent:
    """Load a logged model as an MLflow ``ResponsesAgent``.

    Its ``predict`` and ``predict_stream`` use the form of OpenAI's Responses API, and MLflow traces it as an agent.

    Args:
        model_uri: as for ``load_model``.
        dst_path: as for ``load_model``.
        settings: as for ``load_model``.

    Raises:
        MlflowException: as ``load_model``.
    """
    from ..predict.responses_agent import LoggedModelAgent

    return LoggedModelAgent(_session(model_uri, dst_path, dict(settings)))


def _session(model_uri: str, dst_path: str | None, settings: dict[str, Any]) -> Session:
    root, uri = _found(model_uri, dst_path)
    bundle, config = configured(root, settings)
    return Session(
        with_draft(bundle, config.settings),
        config.settings,
        config.request_defaults,
        uri=uri,
        name=name_of(root, uri),
    )


def _found(model_uri: str | os.PathLike[str], dst_path: str | None) -> tuple[Path, str]:
    """Return the local root of a model, which is logged into the cache if it is not logged yet, and the URI that it was
    fetched from: "" for a path, and a version in place of an alias."""
    is_here = isinstance(model_uri, str | os.PathLike) and bool(str(model_uri)) and os.path.exists(model_uri)
    if dst_path is None and str(model_uri) and (is_here or isinstance(model_uri, str)):
        root = logged(str(model_uri))
        if root is not None:
            return root, ""
    if is_here or not isinstance(model_uri, str) or not model_uri:
        return local_root(model_uri, dst_path), ""
    uri = pinned(model_uri)
    return local_root(uri, dst_path), uri


@raises_mlflow
def _load_pyfunc(path: str, model_config: dict[str, Any] | None = None) -> PyfuncModel:
    """Load the model under ``path``: the entry point for ``mlflow.pyfunc.load_model``."""
    signature_enforcement.install()
    name = name_of(Path(path), loaded_uri(Path(path)))
    root = settled(Path(path))
    bundle, config = configured(root, model_config)
    settings = config.settings
    if is_scoring_server() and not (settings.in_process or settings.trust_remote_code):
        hide_torch()
    found = with_draft(bundle, config.settings)
    return PyfuncModel(found, config.settings, config.request_defaults, name=name, output=config.output)


def close(model: LanguageModel | PyfuncModel | PyFuncModel) -> None:
    """Release the engine of a model that ``load_model`` or ``mlflow.pyfunc.load_model`` returned.

    Its running requests end with an error. The engine process ends when it has no other client. Closing twice is
    harmless. A garbage-collected object releases its engine by itself.

    Raises:
        MlflowException: ``model`` is not a model of this flavor.
    """
    _own(model).close()


@contextlib.contextmanager
def closing(model: M) -> Iterator[M]:
    """Close ``model`` at the end of the block: ``with closing(mlflow.pyfunc.load_model(uri)) as model:``.

    Raises:
        MlflowException: ``model`` is not a model of this flavor.
    """
    own = _own(model)
    try:
        yield model
    finally:
        own.close()


def _own(model: object) -> LanguageModel | PyfuncModel:
    from mlflow.pyfunc import PyFuncModel

    raw: object = model
    if isinstance(model, PyFuncModel):
        with contextlib.suppress(NotImplementedError):
            raw = model.get_raw_model()
    if not isinstance(raw, LanguageModel | PyfuncModel):
        raise MlflowException.invalid_parameter_value(
            f"model: a {type(model).__name__} is not allowed; expected what llm.load_model, or mlflow.pyfunc.load_model"
            " for a model of the flavor llm, returned"
        )
    return raw
