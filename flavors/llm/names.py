"""The names by which MLflow knows this flavor, and its own in the MLmodel file; they stand in every saved model."""

from __future__ import annotations

FLAVOR_NAME = "llm"
LOADER_MODULE = "mlflow_llm.flavors.llm"

# as MLflow has them, for who reads a model without its import: mlflow.models.model and mlflow.pyfunc
MLMODEL = "MLmodel"
PYFUNC = "python_function"
MODEL_CONFIG = "config"
