"""Import paths for the benchmarks, which are scripts beside the package and import one another."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
