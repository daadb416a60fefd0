"""Every benchmark that runs our engine says which kernels it measures, and does not measure torch's unasked.

An editable install of a checkout has kernels only if they were built in place: without them the engine runs torch's,
and says so in a log that a benchmark does not show.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mlflow_llm.serving.engine.core import EngineCore

C = TypeVar("C", bound="EngineCore")


def say_kernels(asked: str = "auto") -> None:
    """Print which native kernels this Python's engines run; ``asked``: the engine's setting ``kernels``.

    Raises ``SystemExit`` if there are none and torch's were not asked for.
    """
    from mlflow_llm.serving.engine.native import library

    if asked == "torch":
        print("kernels measured: torch's, as asked for", file=sys.stderr, flush=True)
        return
    try:
        path = library.library_path()
    except library.NotNative as reason:
        raise SystemExit(
            f"torch's kernels would be measured, not ours, in {library.__file__}: {reason}. Build them there "
            "(python setup.py build_ext --inplace), or run a copy of benchmarks/ outside the checkout, with the wheel "
            "installed"
        ) from None
    print(f"kernels measured: {library.instruction_set()}, {path}", file=sys.stderr, flush=True)


def announced(core: C) -> C:
    """Return ``core`` after printing which kernels it runs, and why not ours if they are others."""
    info = core.info
    loud = "" if info.kernels == "native" else "ATTENTION: our own kernels are not measured. "
    print(f"{loud}kernels of this engine: {info.kernels_summary}", file=sys.stderr, flush=True)
    return core
