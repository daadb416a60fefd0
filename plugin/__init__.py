"""The entry points that MLflow loads: the deployments client, judges, and the AI Gateway's provider."""
