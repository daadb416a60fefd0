"""Spare a process slow imports: load a module when it is first used, or keep torch out."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any


class Lazy:
    """A stand-in for module ``name``, which is imported on the first access to an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value


def hide_torch() -> None:
    """Make ``import torch`` fail in this process, as if it were not installed.

    A worker (ours or MLflow's) needs only the tokenizers of transformers, which imports torch whenever it is installed.
    Does nothing if torch or transformers is already imported. Do not call it in a process that may run a model's own
    code, which may need torch.
    """
    if "transformers" in sys.modules:
        return
    # None is Python's mark for a module that cannot be imported; find_spec, which transformers uses, honours it too
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
