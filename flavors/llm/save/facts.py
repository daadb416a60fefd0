"""The facts of a model that a person asks for first: size, type, licence, context, and where its adapters come from.

They are found when the model is saved and stored in its MLmodel file, from which ``registry_pages`` shows them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from ..model import manifest as manifests
from ..model.hub import HUB_ID
from ..model.manifest import MODEL, Manifest
from ..model.stored_facts import AdapterFacts, Facts, Lineage
from ..model.tasks import config_file, read_config
from .adapters import CONFIG

MAX_TEXT = 200  # characters of a value that a checkpoint gives
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "LICENCE.txt", "COPYING")
# the first words of a licence's text, in lower case and without punctuation
TITLES = {
    "apache license version 2 0": "apache-2.0",
    "mit license": "mit",
    "permission is hereby granted free of charge": "mit",
    "gnu affero general public license version 3": "agpl-3.0",
    "gnu general public license version 3": "gpl-3.0",
    "attribution 4 0 international": "cc-by-4.0",
    "mozilla public license version 2 0": "mpl-2.0",
}
FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---", re.DOTALL)
MAX_FILE = 2**20  # bytes of a README or licence that are read


def facts_of(
    root: Path,
    model_dir: Path,
    manifest: Manifest,
    *,
    model: Any,
    parameters: int,
    context_length: int,
    lineages: Mapping[str, Lineage],
) -> Facts:
    """Return the facts of the model that was written under ``root``; ``model_dir`` may be that of its base.

    ``model`` is the argument of ``save_model``, which may give the model's name. Nothing that a checkpoint lacks is an
    error.
    """
    config = read_config(model_dir)
    name, named = _name(model, config, manifest), config.get("architectures")
    base = name if manifest.base is None else manifest.base.uri
    weights = sorted(model_dir.rglob("*.safetensors"))
    return Facts(
        name=name,
        architecture=_text(named[0]) if isinstance(named, list) and named else None,
        parameters=parameters,
        context_length=context_length,
        dtype=_dtype(weights),
        license=_licence(model_dir, config),
        weight_bytes=sum(file.stat().st_size for file in weights),
        base_hash=_base_hash(manifest, model_dir),
        adapters={one: _adapter(root, one, manifest, base, lineages.get(one, Lineage())) for one in manifest.adapters},
    )


def _name(model: Any, config: dict[str, Any], manifest: Manifest) -> str | None:
    """Return a hub id, or the name of the directory or file: never a path, which other machines have not."""
    if manifest.base is not None:
        return None
    if isinstance(model, str) and HUB_ID.fullmatch(model) and not Path(model).exists():
        return model
    given = getattr(getattr(model, "config", None), "_name_or_path", None) or config.get("_name_or_path")
    if isinstance(given, str) and HUB_ID.fullmatch(given) and "/" in given and not given.startswith("."):
        return _text(given)
    if model is None or not isinstance(model, str | Path):
        return None
    return _text(Path(model).expanduser().absolute().name)


def _base_hash(manifest: Manifest, model_dir: Path) -> str:
    """Return the content hash of the base's own files: equal for all models over one base, whatever their adapters."""
    holder = manifest if manifest.base is None else manifests.read(model_dir.parent)
    return manifests.content_hash_of({path: one for path, one in holder.files.items() if path.startswith(MODEL)})


def _adapter(root: Path, name: str, manifest: Manifest, base: str | None, lineage: Lineage) -> AdapterFacts:
    folder = f"adapters/{name}/"
    config = json.loads((root / folder / CONFIG).read_bytes())
    rank = config.get("r")  # learned prompts have none
    return AdapterFacts(
        method=_text(config.get("peft_type")) or "LORA",
        rank=rank if isinstance(rank, int) else None,
        base=_text(config.get("base_model_name_or_path")) or base,
        bytes=sum(entry.size for path, entry in manifest.files.items() if path.startswith(folder)),
        lineage=lineage,
    )


def _dtype(weights: list[Path]) -> str | None:
    """Return the floating-point type of most of the weights, from the headers of their files."""
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for file in weights:
        with safe_open(str(file), framework="numpy") as stored:
            for key in stored.keys():  # noqa: SIM118
                part = stored.get_slice(key)
                kind = str(part.get_dtype())
                sizes[kind] = sizes.get(kind, 0) + prod(part.get_shape())
    found = {FLOATS[kind]: size for kind, size in sizes.items() if kind in FLOATS}
    return max(found, key=lambda kind: found[kind]) if found else None


def _licence(model_dir: Path, config: dict[str, Any]) -> str | None:
    """Return the licence that the model card names, or config.json, or the text of a licence in the directory."""
    folders = dict.fromkeys((model_dir, config_file(model_dir).parent))
    for folder in folders:
        card = _front_matter(folder / "README.md")
        named = _text(card.get("license"))
        if named == "other":
            named = _text(card.get("license_name")) or named
        if named:
            return named
    if named := _text(config.get("license")):
        return named
    for folder in folders:
        for name in LICENCE_FILES:
            if text := _read(folder / name):
                return _titled(text)
    return None


def _front_matter(file: Path) -> dict[str, Any]:
    """Return the values at the head of a model card; {} if it has none."""
    found = FRONT_MATTER.match(_read(file).replace("\r\n", "\n"))
    if found is None:
        return {}
    try:
        values = yaml.safe_load(found[1])
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _titled(text: str) -> str:
    """Return the name of a licence that is known by its first words, else the first line of ``text``."""
    words = " ".join(re.findall("[a-z0-9]+", text[:1000].lower()))
    known = next((name for title, name in TITLES.items() if title in words), None)
    return known or _text(next((line for line in text.splitlines() if line.strip()), "")) or "unknown"


def _read(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return stream.read(MAX_FILE).decode(errors="replace")
    except OSError:
        return ""


def _text(value: Any) -> str | None:
    """Return a value of a checkpoint as a line of text; None if it is none, or a list of several licences joined."""
    if isinstance(value, list):
        value = ", ".join(str(one) for one in value[:8])
    if not isinstance(value, str):
        return None
    line = " ".join("".join(c if c.isprintable() else " " for c in value).split())
    return line[:MAX_TEXT] or None
