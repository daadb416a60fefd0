"""What a command of MLflow's, and a program that logs a model, pays for before it does anything."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers")
CODE = f"import sys, mlflow_llm.plugin.deployments; print(*(name for name in {HEAVY!r} if name in sys.modules))"


def test_plugin_and_flavor_import_no_torch() -> None:
    """Neither the deployments client nor the flavor has torch or transformers in memory until a model is looked at."""
    asked = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert asked.stdout.split() == []
