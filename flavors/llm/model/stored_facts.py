"""The facts of a model as its MLmodel file has them: what a person asks for first, and where its adapters come from.

``save.facts`` finds them when a model is saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]
from msgspec import Struct

from .names import FLAVOR_NAME, MLMODEL

FACTS = "facts"  # the key of the flavor in the MLmodel file


class Lineage(Struct, frozen=True, kw_only=True):
    """The origin of an adapter: the ``source`` that was given as a URI, the run that trained it, and the datasets of
    that run, each as ``name@digest``."""

    source: str | None = None
    run_id: str | None = None
    datasets: tuple[str, ...] = ()


class AdapterFacts(Struct, frozen=True, kw_only=True):
    """An adapter: its method as peft names it, rank, the base that it was trained on, its size, and its lineage."""

    method: str
    rank: int | None
    base: str | None
    bytes: int
    lineage: Lineage = Lineage()


class Facts(Struct, frozen=True, kw_only=True):
    """A model. ``dtype`` is that of its floating-point weights as stored; ``parameters`` counts tied weights once.
    ``base_hash`` is the content hash of the base's files, without adapters and tokenizer; None in older models."""

    name: str | None
    architecture: str | None
    parameters: int
    context_length: int
    dtype: str | None
    license: str | None
    weight_bytes: int
    base_hash: str | None = None
    adapters: dict[str, AdapterFacts] = {}

    @property
    def adapter_bytes(self) -> int:
        return sum(adapter.bytes for adapter in self.adapters.values())


def stored_facts(flavor: Mapping[str, Any]) -> Facts | None:
    """Read the facts that the flavor's part of an MLmodel file has; None in a model of an earlier release."""
    try:
        return msgspec.convert(flavor[FACTS], Facts)
    except (KeyError, msgspec.ValidationError):
        return None


def facts_in(root: Path) -> Facts | None:
    """Read the facts of the saved model under ``root``; None if there is none, or it has none."""
    try:
        described = yaml.safe_load((root / MLMODEL).read_text(encoding="utf-8"))
        return stored_facts(described["flavors"][FLAVOR_NAME])
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return None


def lineage_lines(adapters: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Yield, of each adapter (a directory by its name) of saved models, the name and a line that says what it is."""
    known: dict[Path, Facts | None] = {}
    for name, place in sorted(adapters.items()):
        root = Path(place).parent.parent
        if root not in known:
            known[root] = facts_in(root)
        facts = known[root]
        if facts is not None and name in facts.adapters:
            yield name, line_of(facts.adapters[name])


def line_of(adapter: AdapterFacts, quote: str = "") -> str:
    """Return a line on an adapter: its method, rank, base, run and datasets, each name between ``quote``."""
    parts = [_quoted(adapter.method, quote)]
    if adapter.rank is not None:
        parts.append(f"rank {adapter.rank}")
    if adapter.base is not None:
        parts.append(f"trained on {_quoted(adapter.base, quote)}")
    if adapter.lineage.run_id is not None:
        parts.append(f"by run {_quoted(adapter.lineage.run_id, quote)}")
    if adapter.lineage.datasets:
        parts.append(f"with {', '.join(_quoted(one, quote) for one in adapter.lineage.datasets)}")
    return ", ".join(parts)


def _quoted(text: str, quote: str) -> str:
    return f"{quote}{text.replace(quote, chr(39)) if quote else text}{quote}"
