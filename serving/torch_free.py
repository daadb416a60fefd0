"""A worker, ours or MLflow's, without torch: it only wants tokenizers of transformers, which imports torch wherever it
finds it."""

from __future__ import annotations

import os
import sys


def hide_torch() -> None:
    """Make ``import torch`` fail in this process, as where it is not installed; does nothing where torch or
    transformers is imported already. Not to be called where a model's own code may run, which may want torch."""
    if "transformers" in sys.modules:
        return
    # None is how Python marks a module that cannot be imported; find_spec, by which transformers looks, knows it too
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
