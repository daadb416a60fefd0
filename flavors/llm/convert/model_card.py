"""The model card of an exported model: its licence, and where its weights and adapters come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]

from ....serving.interface.errors import shown
from ....serving.model_files.model_uri import in_store
from ..model import manifest as manifests
from ..model import model_registry
from ..model.base_model import fetch_base
from ..model.hub import HUB_ID
from ..model.stored_facts import Facts, facts_in
from ..save.registry_pages import adapter_line, code

CARD = "README.md"


def write_card(
    target: Path, root: Path, *, uri: str, merge: str | None, beside: Sequence[str], unsaid: Mapping[str, Any]
) -> None:
    """Write ``README.md`` in ``target``; a card that the model brought keeps its text, and the lineage follows it."""
    facts, base = _facts(root)
    lineage = "\n".join(_lineage(root, facts, uri=uri, merge=merge, beside=beside, unsaid=unsaid))
    file = target / CARD
    if file.is_file():
        text = file.read_text(encoding="utf-8", errors="replace").rstrip()
        file.write_text(f"{text}\n\n{lineage}\n", encoding="utf-8")
        return
    head: dict[str, Any] = {"library_name": "sentence-transformers" if _is_sentence(target) else "transformers"}
    if facts is not None and facts.license is not None:
        head["license"] = facts.license
    if base is not None and "/" in base and HUB_ID.fullmatch(base):
        head["base_model"] = base
    text = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    file.write_text(f"---\n{text}---\n\n# {code(base or target.name)}\n\n{lineage}\n", encoding="utf-8")


def _lineage(
    root: Path,
    facts: Facts | None,
    *,
    uri: str,
    merge: str | None,
    beside: Sequence[str],
    unsaid: Mapping[str, Any],
) -> list[str]:
    manifest = manifests.read(root)
    lines = ["## Exported from MLflow", ""]
    if in_store(uri):  # a path says nothing on another machine
        lines.append(f"- Model: {code(model_registry.pinned(uri))}")
    lines.append(f"- Content hash: {code(manifest.content_hash)}")
    if facts is not None and facts.base_hash is not None:
        lines.append(f"- Content hash of the base's own files: {code(facts.base_hash)}")
    if manifest.base is not None:
        lines.append(f"- Base: {code(manifest.base.uri)}, content hash {code(manifest.base.content_hash)}")
    adapters = {} if facts is None else facts.adapters
    for name in (merge,) if merge is not None else beside:
        line = adapter_line(name, adapters[name]) if name in adapters else f"- {code(name)}"
        lines.append(
            line + (" (merged into these weights)" if merge is not None else f", in {code(f'adapters/{name}')}")
        )
    default = manifest.default_adapter
    if merge is None and default is not None:
        lines.append(f"- Where a request names no adapter, {code(default)} answers in MLflow")
    lines += [f"- Not part of the export: {code(f'{name}={shown(value)}')}" for name, value in unsaid.items()]
    return lines


def _facts(root: Path) -> tuple[Facts | None, str | None]:
    """Return the facts of a model together with those of its base, and the name of the base."""
    facts = facts_in(root)
    manifest = manifests.read(root)
    if manifest.base is None or facts is None:
        return facts, None if facts is None else facts.name
    below = facts_in(fetch_base(manifest.base, weights=False))
    if below is None:
        return facts, None

    return msgspec.structs.replace(facts, adapters=below.adapters | facts.adapters), below.name


def _is_sentence(target: Path) -> bool:
    return (target / "modules.json").is_file()
