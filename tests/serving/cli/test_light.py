"""What a command costs before it does anything."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "tokenizers", "mlflow", "numpy", "pandas")
CODE = f"""
import sys
import mlflow_llm.serving.cli, mlflow_llm.serving.web.server, mlflow_llm.serving.web.worker
print(*(name for name in {HEAVY!r} if name in sys.modules))
"""


def test_commands_and_arbiter_import_no_heavy_library() -> None:
    """The command line, and the process that starts a server's workers, have neither torch nor MLflow in memory."""
    asked = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert asked.stdout.split() == []
