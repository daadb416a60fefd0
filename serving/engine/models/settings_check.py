"""Settings that no machine can run a model with: refused when an engine starts, and before that when a model is saved.

What depends on the machine (its devices, kernels and memory) is refused where the engine finds it out.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...interface.errors import PackagingError
from ...interface.request import POOLED, Task
from ...interface.settings import EngineSettings
from ..weights.stored_weights import refuse_other_weights


def refuse_settings(settings: EngineSettings, tasks: Sequence[Task], stored: str | None) -> None:
    """Raises ``PackagingError`` that names the setting. ``stored``: how the model's linears are, None as floats."""
    if settings.compile:
        raise PackagingError("compile: True is not allowed; expected False (compiled decoding is not built yet)")
    refuse_other_weights(settings, stored)
    for task in POOLED.intersection(tasks):
        if len(tasks) > 1:
            raise PackagingError(f"tasks: {', '.join(tasks)} is not allowed; expected {task} alone or none")
        _refuse_of_text(settings)


def _refuse_of_text(settings: EngineSettings) -> None:
    """What is for models that make text."""
    if settings.draft_model is not None:
        raise PackagingError(f"draft_model: {settings.draft_model} is of no use; expected null: no text is made")
    if settings.kv_cache_dtype != "auto":
        asked = f"kv_cache_dtype: {settings.kv_cache_dtype!r} is not allowed; expected 'auto'"
        raise PackagingError(f"{asked}: nothing is kept of texts that are read once")
    if settings.kv_block_size is not None:
        asked = f"kv_block_size: {settings.kv_block_size} is not allowed; expected null"
        raise PackagingError(f"{asked}: nothing is kept of texts that are read once")
