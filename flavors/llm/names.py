"""The names by which MLflow knows this flavor; they stand in every saved model."""

from __future__ import annotations

FLAVOR_NAME = "llm"
LOADER_MODULE = "mlflow_llm.flavors.llm"
