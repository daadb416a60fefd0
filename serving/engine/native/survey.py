"""Prints, as JSON, what an engine would run on here. ``doctor`` runs it in a process started like an engine's."""

from __future__ import annotations

import json
from typing import Any

import torch

from ...system import child
from . import library


def survey() -> dict[str, Any]:
    """Return what an engine would run on.

    ``kernels`` is "native" if they run, for ``instruction_set``; else ``reason`` says why not. ``by_name`` says whether
    the sets run that are only used if asked for."""
    found: dict[str, Any] = {"package": child.own_place(), "torch": torch.__version__}
    others = [name for name, instructions in library.INSTRUCTION_SETS.items() if instructions.by_name]
    found["by_name"] = "; ".join(f"{name}: {library.why_not(name) or 'runs here'}" for name in others)
    try:
        library.required()
    except library.NotNative as reason:
        return {**found, "kernels": "torch", "reason": str(reason)}
    return {**found, "kernels": "native", "instruction_set": library.instruction_set(), "reason": ""}


if __name__ == "__main__":
    print(json.dumps(survey()))
