"""``materialise``: write a model that is whole, for places without a registry, such as a container's image."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec
import yaml  # type: ignore[import-untyped]

from ....serving.interface.errors import PackagingError
from ..errors import raises_mlflow
from ..model import manifest as manifests
from ..model.base_model import fetch_base
from ..model.fetch import local_root
from ..model.manifest import DEFAULT_TEMPLATE, Manifest
from ..model.names import FLAVOR_NAME, MLMODEL
from ..model.stored_facts import FACTS, stored_facts

TEMPLATES = ("chat_templates", DEFAULT_TEMPLATE)


@raises_mlflow
def materialise(model_uri: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Write the logged model at ``model_uri`` to the local directory ``path``, together with its base, if it has one.

    A version that holds only an adapter needs its base from the registry each time it is loaded. The model written here
    has the files of both, gives the same answers, and needs nothing else: ``mlflow models generate-dockerfile -m PATH``
    and ``mlflow-llm serve -m PATH`` take it as it is.

    Args:
        model_uri: a local directory, or any URI that MLflow can download.
        path: where to write the model; the directory must be empty or not exist yet.

    Returns:
        ``path``, made absolute.

    Raises:
        MlflowException: ``errors.ModelNotFound`` if there is no such model or base; ``errors.PackagingError`` if one of
            them is damaged, or ``path`` is not empty.
    """
    target = Path(path).absolute()
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise PackagingError(f"path: {target.name} already exists and is not empty")
    root = local_root(model_uri)
    manifest = manifests.read(root)
    manifests.check(manifest, root)
    shutil.copytree(root, target, dirs_exist_ok=True, copy_function=shutil.copyfile)
    if manifest.base is None:
        return target
    base_root = fetch_base(manifest.base)
    base = manifests.read(base_root)
    manifests.check(base, base_root)
    _add(base_root, base, _from_base(manifest, base), target)
    whole = manifests.describe(
        target,
        tasks=manifest.tasks,
        default_adapter=manifest.default_adapter,
        embedding=manifest.embedding or base.embedding,
        cross_encoder=manifest.cross_encoder or base.cross_encoder,
        tool_formats=manifest.tool_formats or base.tool_formats,
        quantization=base.quantization,
        images=base.images,
    )
    whole = manifests.with_environment(whole, target)
    manifests.write(whole, target)
    _describe(target / MLMODEL, whole, base_root / MLMODEL)
    return target


def _from_base(manifest: Manifest, base: Manifest) -> Iterable[str]:
    """Return the paths of the base's files that an adapter's version uses: what it stores itself takes their place."""
    replaced: list[str] = []
    for names in (("tokenizer",), TEMPLATES):
        if any(path.split("/")[0] in names for path in manifest.files):
            replaced += names
    return (path for path in base.files if path.split("/")[0] not in replaced)


def _add(base_root: Path, base: Manifest, paths: Iterable[str], target: Path) -> None:
    for path in paths:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base_root / path, target / path)
        manifests.check_file(target / path, path, base.files[path], full=True)


def _describe(file: Path, manifest: Manifest, base_file: Path) -> None:
    """Write in the MLmodel file what this flavor says there of the model."""
    described = yaml.safe_load(file.read_text(encoding="utf-8"))
    flavor = described["flavors"][FLAVOR_NAME]
    flavor |= {
        "format_version": manifest.format_version,
        "content_hash": manifest.content_hash,
        "adapters": manifest.adapters,
        "base": None,
    }
    own = stored_facts(flavor)
    base = stored_facts(yaml.safe_load(base_file.read_text(encoding="utf-8"))["flavors"].get(FLAVOR_NAME, {}))
    if own is not None and base is not None:
        both = msgspec.structs.replace(base, adapters=base.adapters | own.adapters)
        flavor[FACTS] = msgspec.to_builtins(both)
    file.write_text(yaml.safe_dump(described, sort_keys=False), encoding="utf-8")
