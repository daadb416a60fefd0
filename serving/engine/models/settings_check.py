"""Checks of settings that no machine can run a model with, made when an engine starts and when a model is saved.

Settings that depend on the machine (its devices, kernels and memory) are refused by the parts of the engine that use
them."""

from __future__ import annotations

from collections.abc import Sequence

from ...interface.errors import PackagingError
from ...interface.request import POOLED, Task
from ...interface.settings import EngineSettings
from ..weights.stored_weights import refuse_other_weights


def refuse_settings(settings: EngineSettings, tasks: Sequence[Task], stored: str | None) -> None:
    """Check the settings. Raises ``PackagingError``, which names the setting. ``stored``: how the model's linears are
    stored, None as floats."""
    refuse_other_weights(settings, stored)
    for task in POOLED.intersection(tasks):
        if len(tasks) > 1:
            raise PackagingError(f"tasks: {', '.join(tasks)} is not allowed; expected {task} alone or none")
        _refuse_generation_settings(settings)


def _refuse_generation_settings(settings: EngineSettings) -> None:
    """Refuse settings of generating models only."""
    if settings.draft_model is not None:
        raise PackagingError(
            f"draft_model: {settings.draft_model} is not allowed; expected null: the model generates no text"
        )
    if settings.kv_cache_dtype != "auto":
        asked = f"kv_cache_dtype: {settings.kv_cache_dtype!r} is not allowed; expected 'auto'"
        raise PackagingError(f"{asked}: the model generates no text and has no KV cache")
    if settings.kv_block_size is not None:
        asked = f"kv_block_size: {settings.kv_block_size} is not allowed; expected null"
        raise PackagingError(f"{asked}: the model generates no text and has no KV cache")
