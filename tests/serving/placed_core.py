"""The gated instant engine for models that hosts fetch by URI, whose files may not be added to."""

from __future__ import annotations

import os

import msgspec
from gated_core import GatedCore

from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.settings import EngineSettings

MODEL = "MLFLOW_LLM_TEST_MODEL"  # the directory of ``instant.json`` and of the gate
PLACED_CORE = "placed_core:PlacedCore"


class PlacedCore(GatedCore):
    """A gated engine core whose own files are in the directory that the environment names."""

    def __init__(self, bundle: Bundle, settings: EngineSettings) -> None:
        super().__init__(msgspec.structs.replace(bundle, model_dir=os.environ[MODEL]), settings)
