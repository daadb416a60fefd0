"""The imports of MLflow's commands and of a program that logs a model."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers")
CODE = f"import sys, mlflow_llm.plugin.deployments; print(*(name for name in {HEAVY!r} if name in sys.modules))"


def test_plugin_and_flavor_import_no_torch() -> None:
    """Neither the deployments client nor the flavor imports torch or transformers before a model is read."""
    asked = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert asked.stdout.split() == []
