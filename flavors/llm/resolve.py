"""From a saved model back to a ``Bundle``, and from there to what MLflow and people call."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from ...serving.bundle import Bundle
from ...serving.errors import PackagingError, shown
from . import manifest as manifests
from . import model_config as configs
from . import registry, templates
from .base import fetch, resolve_base
from .failures import FLAVOR_NAME, public
from .manifest import Manifest, Verify
from .options import LoadOptions
from .unlogged import must_be_logged

if TYPE_CHECKING:
    from .model import LanguageModel
    from .pyfunc import PyfuncModel


@public
def load_bundle(model_uri: str | os.PathLike[str], verify: Verify | None = None) -> Bundle:
    """The parts of a saved model as absolute paths, checked against its manifest.

    Args:
        model_uri: a local directory, or any URI that MLflow can download.
        verify: "size" (the default) compares the list of files and their sizes; "full" hashes every byte.
            None takes the environment variable MLFLOW_LLM_VERIFY.

    Raises:
        MlflowException: the model is damaged, was changed, is of a later format, or its base cannot be had.
    """
    return load_bundle_from(_local(model_uri), verify=verify)


def load_bundle_from(root: Path, verify: Verify | None = None, *, weights: bool = True) -> Bundle:
    """``weights``: they must be there. Without them a bundle is good for its texts: tokenizer and templates."""
    manifest = manifests.read(root)
    manifests.check(manifest, root, verify, weights=weights)
    own = _own_adapters(manifest, root)
    if manifest.base is not None:
        return _join(manifest, root, own, resolve_base(manifest.base, verify, weights=weights))
    return Bundle(
        content_hash=manifest.content_hash,
        tasks=manifest.tasks,
        model_dir=str(root / "model"),
        tokenizer_dir=str(root / "tokenizer"),
        adapters=own,
        chat_templates=templates.stored(root),
        embedding=manifest.embedding,
        default_adapter=manifest.default_adapter,
    )


@public
def load_model(model_uri: str, dst_path: str | None = None, **settings: Unpack[LoadOptions]) -> LanguageModel:
    """The model as an object for people: ``.chat``, ``.complete``, ``.embed``.

    Args:
        model_uri: a local directory, or any URI that MLflow can download.
        dst_path: an existing local directory to download to; None lets MLflow choose.
        settings: engine settings (``serving.settings.EngineSettings``) that replace the saved ones, such as
            ``dtype="bfloat16"``; also ``default_adapter``, ``defaults`` and ``generation_config`` (``{}`` for none).
    """
    from .model import LanguageModel
    from .session import Session

    root = _local(model_uri, dst_path)
    bundle, config = configured(root, dict(settings))
    uri = "" if os.path.isdir(model_uri) else str(model_uri)
    return LanguageModel.over(Session(bundle, config.settings, config.request_defaults, uri=uri))


@public
def _load_pyfunc(path: str, model_config: dict[str, Any] | None = None) -> PyfuncModel:
    """What ``mlflow.pyfunc.load_model`` calls; ``path`` is the model's root."""
    from . import enforcement
    from .pyfunc import PyfuncModel

    enforcement.install()
    root = Path(path)
    bundle, config = configured(root, model_config)
    return PyfuncModel(bundle, config.settings, config.request_defaults)


def configured(
    root: Path, overrides: dict[str, Any] | None = None, *, weights: bool = True
) -> tuple[Bundle, configs.ModelConfig]:
    """The bundle and its configuration under ``overrides``, where the default adapter may be another or none."""
    bundle = load_bundle_from(root, weights=weights)
    config = configs.parse({"default_adapter": bundle.default_adapter}, saved_config(root), overrides)
    chosen = config.default_adapter
    if chosen is not None and chosen not in bundle.adapters:
        raise PackagingError(f"default_adapter: {shown(chosen)} is no adapter; expected {_names(bundle.adapters)}")
    return msgspec.structs.replace(bundle, default_adapter=chosen), config


def _names(adapters: dict[str, str]) -> str:
    return ", ".join(sorted(adapters)) or "None, the model has no adapters"


def saved_config(root: Path) -> dict[str, Any]:
    """The ``model_config`` in the MLmodel file; empty for a bundle that has none beside it."""
    from mlflow.models import Model
    from mlflow.models.model import MLMODEL_FILE_NAME
    from mlflow.pyfunc import FLAVOR_NAME as PYFUNC
    from mlflow.pyfunc import MODEL_CONFIG

    if not (root / MLMODEL_FILE_NAME).is_file():
        return {}
    flavors = Model.load(str(root)).flavors
    if FLAVOR_NAME not in flavors:
        raise PackagingError(f"this model was not saved by mlflow-llm; its flavors are {', '.join(sorted(flavors))}")
    return dict(flavors.get(PYFUNC, {}).get(MODEL_CONFIG) or {})


def _local(model_uri: str | os.PathLike[str], dst_path: str | None = None, *, weights: bool = True) -> Path:
    """Where the model lies on this machine. Raises ``ModelNotFound``; ``PackagingError`` for what is not logged yet."""
    path = Path(model_uri)
    must_be_logged(str(model_uri))
    if path.is_dir() and dst_path is None:
        return path.absolute()
    uri = str(model_uri) if path.is_dir() else registry.fixed(str(model_uri))
    return fetch(uri, dst_path, weights=weights)


def _own_adapters(manifest: Manifest, root: Path) -> dict[str, str]:
    return {name: str(root / "adapters" / name) for name in manifest.adapters}


def _join(manifest: Manifest, root: Path, own: dict[str, str], base: Bundle) -> Bundle:
    """The base with these adapters over it; a tokenizer or template stored here replaces the base's."""
    both = f"{base.content_hash}\n{manifest.content_hash}\n"
    has_tokenizer = any(path.startswith("tokenizer/") for path in manifest.files)
    return Bundle(
        content_hash=hashlib.sha256(both.encode()).hexdigest(),
        tasks=manifest.tasks,
        model_dir=base.model_dir,
        tokenizer_dir=str(root / "tokenizer") if has_tokenizer else base.tokenizer_dir,
        adapters=base.adapters | own,
        chat_templates=templates.stored(root) or base.chat_templates,
        embedding=manifest.embedding or base.embedding,
        default_adapter=manifest.default_adapter,
    )
