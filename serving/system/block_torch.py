"""Keep torch out of a worker (ours or MLflow's): it only needs the tokenizers of transformers, which imports torch
whenever it is installed."""

from __future__ import annotations

import os
import sys


def hide_torch() -> None:
    """Make ``import torch`` fail in this process, as if it were not installed.

    Does nothing if torch or transformers is already imported. Do not call it in a process that may run a model's own
    code, which may need torch.
    """
    if "transformers" in sys.modules:
        return
    # None is Python's mark for a module that cannot be imported; find_spec, which transformers uses, honours it too
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
