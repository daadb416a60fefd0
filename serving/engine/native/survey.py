"""What an engine would run on here, as JSON: ``doctor`` asks a process that is started like an engine's."""

from __future__ import annotations

import json
from typing import Any

import torch

from ... import child
from . import library


def survey() -> dict[str, Any]:
    """``kernels`` is "native" where ours run, for ``instruction_set``; else ``reason`` says why they do not.
    ``by_name``: whether those run that are not chosen unless asked for."""
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
