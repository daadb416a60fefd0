"""The names by which MLflow knows this flavor, and MLflow's own names in the MLmodel file of every saved model."""

from __future__ import annotations

FLAVOR_NAME = "llm"
LOADER_MODULE = "mlflow_llm.flavors.llm"

# copied from mlflow.models.model and mlflow.pyfunc, for code that reads a model without importing MLflow
MLMODEL = "MLmodel"
PYFUNC = "python_function"
MODEL_CONFIG = "config"
